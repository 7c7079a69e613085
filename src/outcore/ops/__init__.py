"""The one table of what we know about each operation."""

from outcore.ops.op import CallFacts as CallFacts
from outcore.ops.op import KeptTensor as KeptTensor
from outcore.ops.op import Op as Op
from outcore.ops.op import Operand as Operand
from outcore.ops.table import TABLE as TABLE
from outcore.ops.table import find as find
