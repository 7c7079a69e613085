"""ReLU that saves one bit per number (Gist's binarised ReLU), where nothing else needs its output in backward.

Autograd saves the whole output of a ReLU to know where it is above zero. Encoding that output when forward is done with
it and making a mask of it again for backward takes two more passes over memory and, at the moment of its backward, a
byte per number. Here the bits are made in the pass that computes ReLU, and backward reads them in the pass that
computes the gradient; nothing is ever decoded.

    forward     read x, write y and bits           (torch: read x, write y; then: read y, write bits)
    backward    read gradient and bits, write      (torch: read gradient and y, write)

The numbers are torch's bit for bit. Gradients come back in the memory format in which torch gives them: where the
gradient has another layout than the output had, the mask is made after all, and torch's own operation runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outcore.cost.buffers import Buffer
from outcore.graph import Graph
from outcore.graph.record.recording import Step
from outcore.graph.strides import has_known_format
from outcore.memory.encode.bitmask import rectified, through, unpack_bits
from outcore.memory.op_fusion.pattern import hooked
from outcore.program.policies import Policies

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def bit_relus(
    graph: Graph, steps: Mapping[str, Step], model: nn.Module, buffers: Mapping[str, Buffer], policy: Policies
) -> dict[str, Step]:
    """The steps that replace those ReLUs whose outputs are saved as signs."""
    order = list(graph.calls)
    calls = [order[i] for name, how in policy.items() if how.codec == "sign" for i in buffers[name].savers]
    found = {}
    for call in calls:
        step = steps[call]
        run, inplace = _as_called(step, model)
        if run is not None:
            found[call] = replace(step, kind="function", target=_Bits(run, inplace))
    return found


def _as_called(step: Step, model: nn.Module) -> tuple[Callable[..., Any] | None, bool]:
    """The call as it was recorded, and whether it writes in place; None where it does more than ReLU."""
    if step.kind != "module":
        name = getattr(step.target, "__name__", "")
        inplace = step.kwargs.get("inplace", step.args[1] if len(step.args) > 1 else False)
        return step.target, name.endswith("_") or bool(inplace)
    module: Any = model.get_submodule(step.target)
    return (None if type(module) is not nn.ReLU or hooked(module) else module), bool(getattr(module, "inplace", False))


class _Bits:
    """One of the model's ReLUs."""

    def __init__(self, run: Callable[..., Any], inplace: bool) -> None:
        self.run, self.inplace = run, inplace

    def __call__(self, x: torch.Tensor, *more: Any, **settings: Any) -> Any:
        if not _suits(x, inplace=self.inplace):
            return self.run(x, *more, **settings)
        return relu_by_bits(x, inplace=self.inplace)


def rectified_by_bits(run: Callable[..., Any], *, inplace: bool, of_module: bool) -> Callable[..., Any]:
    """The function that replaces a ReLU, with the same arguments.

    Args:
        run: the ReLU itself, for what bits are not enough for.
        inplace: whether it writes into its input.
        of_module: whether the first argument is the module, and the input the second.
    """

    def rectify(*called: Any, **settings: Any) -> Any:
        given = called[1:] if of_module else called
        if not given or not _suits(given[0], inplace=inplace):
            return run(*called, **settings)
        return relu_by_bits(given[0], inplace=inplace)

    return rectify


def _suits(x: torch.Tensor, *, inplace: bool) -> bool:
    """Whether bits are enough: there must be something to save, in dense memory."""
    if not (torch.is_grad_enabled() and x.requires_grad) or x.dtype not in _FLOATS or type(x) is not torch.Tensor:
        return False
    whole = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return whole and has_known_format(x) and not (inplace and (x._is_view() or x.is_leaf))


def relu_by_bits(x: torch.Tensor, *, inplace: bool = False) -> torch.Tensor:
    """ReLU of a dense tensor, of which backward saves one bit per number.

    >>> x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    >>> relu_by_bits(x).sum().backward()
    >>> x.grad
    tensor([0., 0., 1.])
    """
    result: torch.Tensor = _ReLU.apply(x, inplace)  # type: ignore[no-untyped-call]
    return result


class _ReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inplace: bool) -> torch.Tensor:
        """The numbers and the bits in one pass."""
        out = x if inplace else _room(x)
        ctx.save_for_backward(rectified(x, out))
        ctx.strides = out.stride()
        if inplace:
            ctx.mark_dirty(x)
            torch.autograd.graph.increment_version(x)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradient where the bits are one."""
        (bits,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _Through.apply(gradient, bits, ctx.strides), None  # type: ignore[no-untyped-call]
        return _let_through(gradient, bits, ctx.strides), None


class _Through(torch.autograd.Function):
    """The same for gradients of gradients: it is linear, with the same bits."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, bits: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        ctx.save_for_backward(bits)
        ctx.strides = strides
        return _let_through(gradient, bits, strides)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Through.apply(gradient, ctx.saved_tensors[0], ctx.strides), None, None  # type: ignore[no-untyped-call]


def _let_through(gradient: torch.Tensor, bits: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if gradient.stride() != strides:
        mask = unpack_bits(bits, gradient.numel(), bits.new_ones((), dtype=torch.int8))
        found: torch.Tensor = torch.ops.aten.threshold_backward(gradient, mask.as_strided(gradient.shape, strides), 0)
        return found
    out = _room(gradient)
    through(gradient, bits, out)
    return out


def _room(like: torch.Tensor) -> torch.Tensor:
    """Memory for a result in the layout that torch's own operation gives it; contiguous where a tensor has both
    formats.

    Otherwise the next operation would compute in another order.
    """
    if like.is_contiguous():
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
        return torch.empty_like(like, memory_format=torch.channels_last)
    return torch.empty_like(like)
