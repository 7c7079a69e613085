"""Element by element, with broadcasting.

Random numbers are a function of where they are used. A tile is computed more than once (two passes, overlapping halos)
and in any order; a mask must be the same each time. So no generator is advanced: the number at a position is a hash of
(seed, call, position), mixed as in Steele, Lea and Flood's SplitMix (OOPSLA 2014). The masks therefore do not depend on
the tiling or on the device; they are *not* those that torch's own generator would give, which depend on the order of
drawing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from outcore.graph.record.recording import Ref
from outcore.ops.region import Region, sizes
from outcore.ops.registry import kinds
from outcore.stream.call import NotStreamable, PlainRule, RegionRule, RuleContext, StreamCall, rule

_KINDS = "activation, identity, sum, product, arithmetic, selection, comparison, cast, copy"


@dataclass(frozen=True)
class Pointwise(PlainRule):
    """Each output element depends on the elements at its place; dimensions of size one stretch."""

    operands: tuple[Ref, ...]
    shapes: tuple[tuple[int, ...], ...]
    rank: int
    again: Callable[[Sequence[torch.Tensor]], Any]

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The same place of each operand."""
        return tuple(
            tuple((0, 1) if n == 1 else out[self.rank - len(shape) + d] for d, n in enumerate(shape))
            for shape in self.shapes
        )

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """The call itself."""
        made: torch.Tensor = self.again(crops)
        return made

    def follow(self, operand: int, dim: int) -> int | None:
        """Aligned at the last dimension."""
        return self.rank - len(self.shapes[operand]) + dim


@dataclass(frozen=True)
class Dropout(PlainRule):
    """Zeros at random; which ones is a function of seed, call and position, so every pass and tiling draws the same."""

    operands: tuple[Ref, ...]
    name: str
    shape: tuple[int, ...]
    rate: float
    whole_channels: bool

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The same place."""
        return (out,)

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Keep an element, or a channel of a sample, with the chance that it is kept."""
        x = crops[0]
        region = (*out[:2], *((0, 1) for _ in out[2:])) if self.whole_channels else out
        shape = (*self.shape[:2], *(1 for _ in out[2:])) if self.whole_channels else self.shape
        keep = keep_mask(region, shape, self.rate, (given.seed, self.name), x.device)
        return x * (keep.to(x.dtype) / (1 - self.rate) if self.rate < 1 else torch.zeros_like(keep, dtype=x.dtype))

    def place(self, out: Region) -> Any:
        """Different everywhere."""
        return out


def pointwise(
    call: StreamCall, operands: tuple[Ref, ...], again: Callable[[Sequence[torch.Tensor]], Any] | None = None
) -> Pointwise:
    """An element-wise call of these operands."""
    if not operands:
        raise NotStreamable("it is called without a tensor")
    return Pointwise(operands, tuple(call.shapes(r) for r in operands), len(call.shape), again or call.recall())


@rule(*kinds(*_KINDS.split(", ")), "detach", "zeros_like", "ones_like", "full_like")
def _elementwise(call: StreamCall) -> Pointwise:
    operands = call.tensors()
    if call.operation in ("to", "type_as") and len(operands) > 1:  # of the other tensor only the type counts
        return pointwise(call, operands[:1], lambda crops: crops[0].to(call.dtype))
    return pointwise(call, operands)


@rule("prelu")
def _prelu(call: StreamCall) -> Pointwise:
    weight: Any = call.state("weight") if call.module is not None else call.bound("input weight")["weight"]
    source = call.input()
    rank = len(call.shape)
    if math.prod(call.shapes(weight)) != 1 and rank > 1 and call.streamed(source) & {1}:
        raise NotStreamable("its weight runs along a streamed dimension")

    def again(crops: Sequence[torch.Tensor]) -> torch.Tensor:
        return F.prelu(crops[0], crops[1].reshape(-1))

    whole = call.shapes(weight)  # of one number for all channels it may have no dimension
    aligned = (*whole, *(1,) * (rank - 2)) if whole and rank > 1 else whole
    return _Weighted((source, weight), (call.shapes(source), aligned), rank, again)


@dataclass(frozen=True)
class _Weighted(Pointwise):
    """A parameter per channel, needed whole."""

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The same place of the input, all of the parameters."""
        return (out, *(((0, n[0]),) if n else () for n in self.shapes[1:]))

    def follow(self, operand: int, dim: int) -> int | None:
        """The input's dimensions stay."""
        return dim if operand == 0 else None


@rule(*kinds("dropout", "alpha dropout"))
def _dropout(call: StreamCall) -> RegionRule:
    source = call.input()
    if call.module is not None:
        rate, active = float(call.module.p), call.module.training  # type: ignore[arg-type]
    else:
        given = call.bound("input p training inplace", p=0.5, training=True, inplace=False)
        rate, active = given["p"], given.get("train", given["training"])
    if not active or rate == 0:
        return pointwise(call, (source,), lambda crops: crops[0])
    if call.operation in kinds("alpha dropout"):
        raise NotStreamable("alpha dropout has no rule")
    return Dropout((source,), call.name, call.shape, rate, call.operation != "dropout")


_MASK = (1 << 32) - 1


def keep_mask(
    region: Region, shape: tuple[int, ...], rate: float, key: tuple[Any, ...], device: torch.device
) -> torch.Tensor:
    """Which elements of a region are kept, each with chance 1 - rate."""
    start = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "little")
    state = torch.full((1,) * len(shape), start, dtype=torch.int64, device=device)
    for dim, (lo, hi) in enumerate(region):
        view = [1] * len(shape)
        view[dim] = hi - lo
        index = torch.arange(lo, hi, dtype=torch.int64, device=device).view(view)
        state = _mix((state * 0x9E3779B1 + index + 1) & _MASK)
    return (_mix(state) >= int(rate * 2**32)).expand(sizes(region))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Spread every bit over all 32."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)
