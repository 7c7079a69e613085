"""Operations along some dimensions that are independent along the others: softmax over channels, linear layers, layer
norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outcore.graph.record.recording import Ref
from outcore.ops.region import Region, whole
from outcore.stream.call import NotStreamable, RuleContext, StreamCall, rule


@dataclass(frozen=True)
class Along:
    """Needs some dimensions of its first operand whole; the others pass through. Other operands are needed whole."""

    operands: tuple[Ref, ...]
    shape: tuple[int, ...]
    """Of the first operand."""
    dims: tuple[int, ...]
    """Those needed whole."""
    keepdim: bool
    """Whether they stay dimensions of the output."""
    again: Callable[[Sequence[torch.Tensor]], Any]
    others: tuple[tuple[int, ...], ...] = ()
    """Shapes of the other operands."""

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The wanted region, but the dimensions needed whole are whole."""
        left = iter(i for d, i in enumerate(out) if not (self.keepdim and d in self.dims))
        region = tuple((0, n) if d in self.dims else next(left) for d, n in enumerate(self.shape))
        return (region, *(whole(s) for s in self.others))

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Make the call, then cut what is wanted of the dimensions it makes."""
        made: torch.Tensor = self.again(crops)
        if self.keepdim:
            for dim in self.dims:
                if made.shape[dim] != out[dim][1] - out[dim][0]:
                    made = made.narrow(dim, out[dim][0], out[dim][1] - out[dim][0])
        return made

    def follow(self, operand: int, dim: int) -> int | None:
        """The dimensions it runs along are needed whole."""
        if operand or dim in self.dims:
            return None
        return dim if self.keepdim else dim - sum(d < dim for d in self.dims)

    def place(self, out: Region) -> Any:
        """The position along the dimensions that it runs over, where these stay; else nothing."""
        return tuple(i for d, i in enumerate(out) if d in self.dims) if self.keepdim else None


@rule("softmax", "log_softmax", "softmin", "glu", "normalize", "cumsum", "cumprod")
def _along_dim(call: StreamCall) -> Along:
    source = call.input()
    shape = call.shapes(source)
    given: Any = getattr(call.module, "dim", None) if call.module is not None else None
    if call.module is None:
        names = "input p dim" if call.operation == "normalize" else "input dim"
        given = call.bound(names, dim=1 if call.operation == "normalize" else -1, dtype=None).get("dim")
    if not isinstance(given, int):
        raise NotStreamable("it does not say along which dimension")
    return Along((source,), shape, (given % len(shape),), True, call.recall())


@rule("softmax2d", "local_response_norm", "channel_shuffle")
def _along_channels(call: StreamCall) -> Along:
    source = call.input()
    shape = call.shapes(source)
    return Along((source,), shape, (len(shape) - 3 if call.operation == "softmax2d" else 1,), True, call.recall())


@rule("linear")
def _linear(call: StreamCall) -> Along:
    given = call.given()
    operands = tuple(r for r in (given[n] for n in ("input", "weight", "bias")) if r is not None)
    shapes = [call.shapes(r) for r in operands]

    def again(crops: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.linear(*crops)

    return Along(operands, shapes[0], (len(shapes[0]) - 1,), True, again, tuple(shapes[1:]))


@rule("layer_norm", "rms_norm")
def _layer_norm(call: StreamCall) -> Along:
    given = call.given()
    normalised, eps = given["normalized_shape"], given["eps"]
    refs = (given["input"], given["weight"], given.get("bias"))
    operands = tuple(r for r in refs if r is not None)
    shapes = [call.shapes(r) for r in operands]
    centred = call.operation == "layer_norm"
    function: Any = torch.nn.functional.layer_norm if centred else torch.nn.functional.rms_norm

    def again(crops: Sequence[torch.Tensor]) -> torch.Tensor:
        weight = crops[1] if len(crops) > 1 else None
        affine = (weight, crops[2] if len(crops) > 2 else None) if centred else (weight,)
        made: torch.Tensor = function(crops[0], tuple(normalised), *affine, eps=eps)
        return made

    rank = len(shapes[0])
    return Along(operands, shapes[0], tuple(range(rank - len(normalised), rank)), True, again, tuple(shapes[1:]))


@rule("matmul")
def _matmul(call: StreamCall) -> Along:
    operands = call.tensors()
    shapes = [call.shapes(r) for r in operands]
    if len(operands) != 2 or len(shapes[1]) != 2 or call.streamed(operands[1]):
        raise NotStreamable("a product of two images needs all of both")
    return Along(operands, shapes[0], (len(shapes[0]) - 1,), True, call.recall(), (shapes[1],))
