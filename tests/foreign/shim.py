"""Lets torchvision import beside a torch it was not built for.

The wheel on PyPI is built against CUDA; next to a CPU-only torch its extension does not load, and torchvision
then fails at import because it registers fake kernels for operators that do not exist (pytorch/vision#9077).
timm and transformers import torchvision and fail with it. The models need none of those operators, only their
schemas.
"""

import contextlib
import importlib.util
from pathlib import Path

import torch

_MISSING = ("nms", "qnms")
_libraries: list[torch.library.Library] = []  # a definition lives as long as its Library


def define_torchvision_operators() -> None:
    """Declare torchvision's operators if its own extension cannot; call before torchvision is imported."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _declared("nms"):
        return
    for extension in Path(spec.origin).parent.glob("_C*.so"):
        with contextlib.suppress(OSError):  # it needs the CUDA libraries
            torch.ops.load_library(str(extension))
    missing = [name for name in _MISSING if not _declared(name)]
    if not missing:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def _declared(name: str) -> bool:
    return hasattr(torch.ops.torchvision, name)
