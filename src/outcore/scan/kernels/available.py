"""Where work runs as Triton kernels; None is returned where there is none for the case.

Triton is optional. Where it is missing, or a kernel does not compile on this machine, the same work runs as
batched matrix products; the first failure is said once, as a warning, and the kernel is not tried again.
The launches are in the files beside this one, the kernels themselves in `outcore.kernels.recurrent`, whose files
import Triton and are imported last of all.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from outcore.scan.cells import CellShape

KIND = {"tanh": 0, "relu": 0, "gru": 1, "lstm": 2}
_MOST_REGISTERS = 2**15
"""Weights a program may hold, in 4-byte registers: half of a multiprocessor's."""
_broken: set[str] = set()
_Result = TypeVar("_Result")


@functools.cache
def _triton_found() -> bool:
    return importlib.util.find_spec("triton") is not None


def available(x: Tensor) -> bool:
    """Whether kernels run on this tensor's device."""
    return (x.is_cuda or interpreted()) and _triton_found()


def interpreted() -> bool:
    """Triton's interpreter runs kernels on CPU tensors; used to test them without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def fits(cell: CellShape, dtype: torch.dtype) -> bool:
    """Whether a cell's recurrent weights can be held in the registers of one program."""
    size = power_of_two(cell.hidden)
    registers = cell.gates * size * size * max(1, dtype.itemsize // 4)
    return not cell.projection and registers <= _MOST_REGISTERS and dtype in (torch.float32, torch.float64)


def dot_precision(dtype: torch.dtype) -> str:
    """How kernels multiply tiles; the interpreter knows no products of bfloat16."""
    return "full" if dtype == torch.float32 and not interpreted() else "ieee"


@functools.cache
def power_of_two(n: int, least: int = 16) -> int:
    """The next power of two, at least the side of the smallest tile."""
    return max(least, 1 << (n - 1).bit_length())


def register_warps(registers: int) -> int:
    """Warps that hold so many numbers at 128 registers a thread; one warp needs no barriers, so as few as
    will do."""
    return min(16, 1 << (-(-registers // (32 * 128)) - 1).bit_length())


def or_none(name: str) -> Callable[[Callable[..., _Result]], Callable[..., _Result | None]]:
    """Make a kernel that fails return None, and warn once."""

    def wrap(launch: Callable[..., _Result]) -> Callable[..., _Result | None]:
        @functools.wraps(launch)
        def guarded(*args: Any) -> _Result | None:
            if name in _broken:
                return None
            try:
                with _where(args):
                    return launch(*args)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                _broken.add(name)
                warnings.warn(
                    f"the Triton kernel for {name} failed ({type(error).__name__}: {error}); "
                    "batched matrix products are used instead, which is slower",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return None

        return guarded

    return wrap


def _where(args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """A context whose current device is that of the first tensor (or adjoint) given, since kernels are launched on
    it."""
    for arg in args:
        tensor = getattr(arg, "values", arg)
        if isinstance(tensor, Tensor):
            elsewhere = tensor.is_cuda and tensor.device.index != torch.cuda.current_device()
            return torch.cuda.device(tensor.device) if elsewhere else nullcontext()
    return nullcontext()
