"""What is known about each operation: one catalogue, one record per operation, facets that packages add."""

from outcore.ops import recompute_encode as recompute_encode
from outcore.ops import saved as saved
from outcore.ops import signature as signature
from outcore.ops import traits as traits
from outcore.ops.describe import describe as describe
from outcore.ops.registry import FACETS as FACETS
from outcore.ops.registry import Facet as Facet
from outcore.ops.registry import Op as Op
from outcore.ops.registry import aten_kind as aten_kind
from outcore.ops.registry import find as find
from outcore.ops.registry import kinds as kinds
from outcore.ops.registry import names as names
from outcore.ops.registry import operation as operation
from outcore.ops.registry import operations as operations
from outcore.ops.saved import CallFacts as CallFacts
from outcore.ops.saved import KeptTensor as KeptTensor
from outcore.ops.saved import Operand as Operand
