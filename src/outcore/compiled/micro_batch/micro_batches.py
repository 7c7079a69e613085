"""A batch in micro-batches, inside of one call of the model.

Where no choice of saved values is within a budget, or only slower, and every sample is for itself
(`sample_wise`), a call runs its batch in parts, one after the other, by one compiled forward and
backward of a part. Most parts are run only for their results, and run again in the backward, each just before its own
gradients are made; of the last ones, as many as there is room for, what backward needs is kept:

    forward    part 1 ▸ part 2 ▸ part 3 ▸ part 4 (kept)        results of all
    backward   part 4 ◂ part 3 again ◂ part 2 again ◂ part 1 again    gradients are added up

So a step has the values of one part where plain training has those of all; and time of one forward more, less what is
kept. The loop sees one call and one backward: gradients of parameters come once, at the end. A part that runs again
draws the random numbers that it drew before. Hooks on parameters, which would see the gradients of parts, make a call
run whole.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from outcore.errors import OutcoreError
from outcore.graph.structure import leaves, substitute

__all__ = ["MicroBatches", "divisors"]

_HOOKS = (
    "outcore: hooks on parameters would see the gradients of micro-batches, so this batch runs whole, beyond the "
    "budget; use register_post_accumulate_grad_hook, which sees their sum"
)


def divisors(batch: int) -> list[int]:
    """Sizes of equal parts of a batch, the largest first; the batch itself is not among them."""
    return [size for size in range(batch // 2, 0, -1) if batch % size == 0]


@dataclass
class MicroBatches:
    """How a batch is divided."""

    size: int
    """Samples of a part."""
    kept: Callable[[], int]
    """Of how many parts what backward needs is kept; asked after the first part has run."""

    def run(self, forward: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Any:
        """What `forward` returns for all samples.

        Args:
            forward: of one part.
            model: whose parameters get gradients.
            args: of the call.
            kwargs: of the call.
        """
        given = [t for _, t in leaves((args, kwargs), torch.Tensor)]
        batch = next((t.shape[0] for t in given if t.dim()), 0)
        if batch <= self.size or batch % self.size:
            return forward(*args, **kwargs)
        trained = [p for p in model.parameters() if p.requires_grad]
        if any(p._backward_hooks for p in trained):
            warnings.warn(_HOOKS, stacklevel=2)
            return forward(*args, **kwargs)
        call = _Call(forward, (args, kwargs), batch, self)
        inputs = [t for t in given if t.requires_grad]
        results = _InParts.apply(call, len(trained), *trained, *inputs)  # type: ignore[no-untyped-call]
        found = iter(results)
        return substitute(call.like, torch.Tensor, lambda _: next(found))


class _Call:
    """One call of the model, in parts."""

    def __init__(self, forward: Callable[..., Any], given: Any, batch: int, division: MicroBatches) -> None:
        self.forward, self.given, self.batch, self.division = forward, given, batch, division
        tensors = [t for _, t in leaves(given, torch.Tensor)]
        self.device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        self.modes = _Modes.current(self.device)
        self.like: Any = None
        """What a part returned, for its structure."""

    @property
    def parts(self) -> int:
        return self.batch // self.division.size

    def divides(self, tensor: torch.Tensor) -> bool:
        """Whether an argument holds samples."""
        return tensor.dim() > 0 and tensor.shape[0] == self.batch

    def part(self, number: int) -> tuple[Any, list[torch.Tensor]]:
        """The arguments of a part, and those of them that get gradients."""
        size, inputs = self.division.size, []

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            piece = tensor.detach().narrow(0, number * size, size) if self.divides(tensor) else tensor.detach()
            if tensor.requires_grad:
                inputs.append(piece.requires_grad_())
            return piece

        return substitute(self.given, torch.Tensor, cut), inputs

    def results(self, number: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What a part returns, with its graph; and its arguments that get gradients."""
        (args, kwargs), inputs = self.part(number)
        with torch.enable_grad():
            output = self.forward(*args, **kwargs)
        found = [t for _, t in leaves(output, torch.Tensor)]
        if any(not t.dim() or t.shape[0] != self.division.size for t in found):
            raise OutcoreError("a result that is not one of every sample cannot be put together from micro-batches")
        if self.like is None:
            self.like = substitute(output, torch.Tensor, lambda t: t.new_empty(0))
        return found, inputs


class _InParts(torch.autograd.Function):
    """A call whose parts run one after the other, and again in the backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, trained: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole: list[torch.Tensor] = []
        ctx.call, ctx.trained, ctx.kept, ctx.drawn = call, trained, {}, []
        constant: list[bool] = []
        for number in range(call.parts):
            drawn = _random_state(call.device)
            found, inputs = call.results(number)
            if not whole:
                whole = [t.new_empty((call.batch, *t.shape[1:])) for t in found]
            size = call.division.size
            for place, t in zip(whole, found, strict=True):
                place.narrow(0, number * size, size).copy_(t.detach())
            ctx.drawn.append(drawn)
            if number >= call.parts - call.division.kept():
                ctx.kept[number] = found, inputs
            constant = [not t.requires_grad for t in found]
            del found, inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*itertools.compress(whole, constant))
        ctx.save_for_backward(*tensors)
        return tuple(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        call, tensors = ctx.call, ctx.saved_tensors
        parameters, given = list(tensors[: ctx.trained]), tensors[ctx.trained :]
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        whole: list[torch.Tensor | None] = [None] * len(given)
        size = call.division.size
        for number in reversed(range(call.parts)):
            found, inputs = ctx.kept.pop(number, (None, None))
            if found is None:
                with call.modes.again(ctx.drawn[number]):
                    found, inputs = call.results(number)
            pairs = [
                (t, g.narrow(0, number * size, size))
                for t, g in zip(found, gradients, strict=True)
                if g is not None and t.requires_grad
            ]
            del found
            made = _gradients(pairs, [*parameters, *inputs])
            del pairs
            for place, gradient in enumerate(made[: len(parameters)]):
                if gradient is not None:
                    here = sums[place]
                    sums[place] = gradient if here is None else here.add_(gradient)
            for place, gradient in enumerate(made[len(parameters) :]):
                if gradient is None:
                    continue
                if not call.divides(given[place]):
                    here = whole[place]
                    whole[place] = gradient if here is None else here.add_(gradient)
                    continue
                if whole[place] is None:
                    whole[place] = torch.zeros_like(given[place])
                whole[place].narrow(0, number * size, size).copy_(gradient)  # type: ignore[union-attr]
            del made, inputs
        return (None, None, *sums, *whole)


def _gradients(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], of: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    if not pairs:
        return [None] * len(of)
    results, gradients = [t for t, _ in pairs], [g for _, g in pairs]
    return list(torch.autograd.grad(results, list(of), gradients, allow_unused=True))


def _random_state(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Where the generators stand that a part draws from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return tuple(states)


@dataclass(frozen=True)
class _Modes:
    """What a part runs under, in forward and again in backward."""

    device: torch.device
    casts: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def current(cls, device: torch.device) -> _Modes:
        kinds = dict.fromkeys((device.type, "cpu"))
        return cls(
            device,
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        )

    @contextlib.contextmanager
    def again(self, drawn: tuple[torch.Tensor, ...]) -> Iterator[None]:
        """A context as the part had it, with the generators where they stood."""
        before = _random_state(self.device)
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            _set_random_state(self.device, drawn)
            try:
                yield
            finally:
                _set_random_state(self.device, before)


def _set_random_state(device: torch.device, states: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
