"""outcore: train networks that do not fit, and fill the GPU with the ones that do.

Everything a user imports is listed here and nowhere else. It is imported when it is first used: ``outcore --version``
and a mistyped command answer before torch is loaded, and a loop that only needs `within` does not wait for the planner
of many ranks. No file beside this one has the name of a public function, or importing it would hide the function.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outcore import data as data
    from outcore import keras as keras
    from outcore import models as models
    from outcore import run as run
    from outcore import scan as scan
    from outcore import spatial as spatial
    from outcore import stream as stream
    from outcore import whatif as whatif
    from outcore.cost.costs import Costs as Costs
    from outcore.cost.measured.measure import measure as measure
    from outcore.cost.model_estimate import estimate as estimate
    from outcore.cost.model_estimate import memory_of as memory_of
    from outcore.errors import CaptureError as CaptureError
    from outcore.errors import JobError as JobError
    from outcore.errors import OutcoreError as OutcoreError
    from outcore.fusion import fuse as fuse
    from outcore.graph import Graph as Graph
    from outcore.graph import capture as capture
    from outcore.job import Job as Job
    from outcore.memory.saved_tensors.lossy_error import gradient_effect as gradient_effect
    from outcore.one_device.within import memory_plan as memory_plan
    from outcore.one_device.within import release as release
    from outcore.one_device.within import within as within
    from outcore.program.plan.document import Plan as Plan
    from outcore.run import Engine as Engine
    from outcore.spatial.choose import plan as plan

__version__ = "0.1.0"

_NAMES = {
    "CaptureError": "errors",
    "Costs": "cost.costs",
    "Engine": "run",
    "Graph": "graph",
    "Job": "job",
    "JobError": "errors",
    "OutcoreError": "errors",
    "Plan": "program.plan.document",
    "capture": "graph",
    "estimate": "cost.model_estimate",
    "fuse": "fusion",
    "gradient_effect": "memory.saved_tensors.lossy_error",
    "measure": "cost.measured.measure",
    "memory_of": "cost.model_estimate",
    "memory_plan": "one_device.within",
    "plan": "spatial.choose",
    "release": "one_device.within",
    "within": "one_device.within",
}
"""Every public function and class, and the module it is in."""
_MODULES = ("data", "keras", "models", "run", "scan", "spatial", "stream", "whatif")


class _Package(ModuleType):
    """The package as users see it."""

    def __dir__(self) -> list[str]:
        return sorted((*_NAMES, *_MODULES, "__version__"))


sys.modules[__name__].__class__ = _Package
import_module("outcore.load_order").watch()


def __getattr__(name: str) -> Any:
    """What is imported when it is first used."""
    if name in _MODULES:
        return import_module(f"outcore.{name}")
    if name in _NAMES:
        found = getattr(import_module(f"outcore.{_NAMES[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module 'outcore' has no attribute {name!r}")
