"""Max pool over images that saves one byte per output, on a GPU (Gist: the input is not needed, the index is small).

torch saves an index of eight bytes per output, and its backward asks for the input too, although it reads nothing of it
but its shape. Here forward writes the position in the window, and backward reads that and the gradient; neither index
nor input is ever whole in backward. The numbers are torch's bit for bit: maxima are picked, not computed, and backward
adds up in torch's order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outcore.graph.record.recording import Step
from outcore.kernels.pool_window import PoolWindow
from outcore.memory.encode.pool_positions import indices_of
from outcore.memory.op_fusion.pattern import hooked

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MOST = 2**31 - 2**11
"""The most elements of an image, with all its channels, that the kernels can count."""


def byte_pools(
    steps: Mapping[str, Step], model: nn.Module, windows: Mapping[str, PoolWindow | None]
) -> dict[str, Step]:
    """The steps that replace the max pools with these windows, where the kernels can do them."""
    found = {}
    for call, window in windows.items():
        run = _as_called(steps[call], model)
        if run is not None and window is not None and window.fits and len(window.image) == 2:
            found[call] = replace(steps[call], kind="function", target=_Pool(run, window))
    return found


def _as_called(step: Step, model: nn.Module) -> Callable[..., Any] | None:
    """The call as it was recorded; None where it does more than pool."""
    if step.kind != "module":
        wants_indices = step.kwargs.get("return_indices", step.args[6] if len(step.args) > 6 else False)
        return None if wants_indices else step.target
    module: Any = model.get_submodule(step.target)
    return None if type(module) is not nn.MaxPool2d or module.return_indices or hooked(module) else module


class _Pool:
    """One of the model's pools."""

    def __init__(self, run: Callable[..., Any], window: PoolWindow) -> None:
        self.run, self.window = run, window
        self.made: dict[tuple[torch.Size, tuple[int, ...]], tuple[torch.Size, torch.memory_format]] = {}
        """Shape and layout of the output, by those of the input."""

    def __call__(self, x: torch.Tensor, *more: Any, **settings: Any) -> Any:
        if not _suits(x, self.window):
            return self.run(x, *more, **settings)
        given = x.shape, x.stride()
        if given not in self.made:
            made = self.run(torch.empty_strided(*given, device="meta"), *more, **settings)
            self.made[given] = made.shape, _format(made)
        shape, form = self.made[given]
        if not x.is_contiguous(memory_format=form):
            return self.run(x, *more, **settings)
        return _MaxPool.apply(x, shape, form, self.window)  # type: ignore[no-untyped-call]


def pooled_by_bytes(run: Callable[..., Any], window: PoolWindow, *, of_module: bool) -> Callable[..., Any]:
    """The function that replaces a max pool that returns no indices, with the same arguments.

    Args:
        run: the pool itself, for what the kernels cannot do.
        window: of the pool.
        of_module: whether the first argument is the module, and the input the second.
    """
    if not window.fits or len(window.image) != 2:
        return run

    def pool(*called: Any, **settings: Any) -> Any:
        own, given = (called[:1], called[1:]) if of_module else ((), called)
        if not given:
            return run(*called, **settings)
        return _Pool(lambda *args, **kwargs: run(*own, *args, **kwargs), window)(*given, **settings)

    return pool


def _suits(x: torch.Tensor, window: PoolWindow) -> bool:
    """Whether the kernels can do it, and there is something to save."""
    if not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") or type(x) is not torch.Tensor or x.dim() != 4:
        return False
    kept = torch.is_grad_enabled() and x.requires_grad and x.dtype in _FLOATS and x.shape[2:] == window.image
    dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    return kept and dense and x.numel() // max(1, x.shape[0]) < _MOST


def _format(made: torch.Tensor) -> torch.memory_format:
    """The memory format of what torch makes, by its strides, also for a single pixel, which has both formats."""
    last = torch.empty(made.shape, device="meta", memory_format=torch.channels_last)
    return torch.channels_last if made.stride() == last.stride() else torch.contiguous_format


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: torch.Size, form: torch.memory_format, window: PoolWindow) -> Any:
        """The maxima and their positions in one pass."""
        from outcore.kernels.byte_index_pool import pool

        ctx.form, ctx.shape, ctx.window = form, x.shape, window
        out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=form)
        positions = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=form)
        pool(x, out, positions, window, last=form is torch.channels_last)
        ctx.save_for_backward(positions)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradient of every pixel, from the windows it lies in."""
        from outcore.kernels.byte_index_pool import unpool

        (positions,), window = ctx.saved_tensors, ctx.window
        out = torch.empty(ctx.shape, dtype=gradient.dtype, device=gradient.device, memory_format=ctx.form)
        if torch.is_grad_enabled():  # for gradients of gradients: torch's own, which has them
            geometry = [list(pair) for pair in (window.kernel, window.stride, window.padding, window.dilation)]
            back = torch.ops.aten.max_pool2d_with_indices_backward
            return back(gradient, out, *geometry, False, indices_of(positions, window)), None, None, None
        ordered = gradient.contiguous(memory_format=ctx.form)
        unpool(ordered, positions, out, window, last=ctx.form is torch.channels_last)
        return out, None, None, None
