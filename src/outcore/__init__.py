"""outcore: train networks that do not fit, and fill the GPU with the ones that do."""

from typing import TYPE_CHECKING, Any

from outcore import models as models
from outcore.cost.costs import Costs as Costs
from outcore.cost.estimate import estimate as estimate
from outcore.cost.measure import measure as measure
from outcore.errors import CaptureError as CaptureError
from outcore.errors import JobError as JobError
from outcore.errors import OutcoreError as OutcoreError
from outcore.graph import Graph as Graph
from outcore.graph import capture as capture
from outcore.job import Job as Job
from outcore.memory.lossy import gradient_effect as gradient_effect
from outcore.plan_document import Plan as Plan
from outcore.planner.on_devices import plan as plan
from outcore.within import memory_plan as memory_plan
from outcore.within import release as release
from outcore.within import within as within

__version__ = "0.1.0"

if TYPE_CHECKING:
    from outcore import data as data
    from outcore import run as run
    from outcore import scan as scan
    from outcore import stream as stream
    from outcore.fusion import fuse as fuse
    from outcore.run import Engine as Engine


def __getattr__(name: str) -> Any:
    """What is imported when it is first used."""
    if name == "Engine":
        from outcore.run import Engine

        return Engine
    if name == "fuse":
        from outcore.fusion import fuse

        return fuse
    if name in ("data", "run", "scan", "stream"):
        import importlib

        return importlib.import_module(f"outcore.{name}")
    raise AttributeError(f"module 'outcore' has no attribute {name!r}")
