"""Rearranging: padding, permuting, reshaping, expanding, pixel shuffles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outcore.graph.record.recording import Ref
from outcore.ops.region import Border, Interval, Region, sizes
from outcore.stream.call import NotStreamable, PlainRule, RuleContext, StreamCall, rule
from outcore.stream.rules.border import BorderedRegion
from outcore.stream.rules.pointwise import Pointwise
from outcore.stream.rules.reshape import ReshapeRule


@dataclass(frozen=True)
class PermuteRule(PlainRule):
    """Dimensions in another order; new ones of size one may appear, and those of size one may be dropped."""

    operands: tuple[Ref, ...]
    shape: tuple[int, ...]
    order: tuple[int | None, ...]
    """Per dimension of the output, the operand's; None for a new one."""

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The same intervals in the operand's order."""
        found: list[Interval] = [(0, 1)] * len(self.shape)
        for to, source in enumerate(self.order):
            if source is not None:
                found[source] = out[to]
        return (tuple(found),)

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Drop, permute, add."""
        kept = [d for d in self.order if d is not None]
        gone = [d for d in range(len(self.shape)) if d not in kept]
        x = crops[0].permute(*kept, *gone)
        for _ in gone:
            x = x.squeeze(-1)
        for dim, source in enumerate(self.order):
            if source is None:
                x = x.unsqueeze(dim)
        return x

    def follow(self, operand: int, dim: int) -> int | None:
        """The new place of the dimension."""
        return self.order.index(dim) if dim in self.order else None


@dataclass(frozen=True)
class Padding(PlainRule):
    """Elements beyond the border, or fewer inside it."""

    operands: tuple[Ref, ...]
    low: tuple[int, ...]
    """Per dimension, for the last ones."""
    reading: BorderedRegion

    def needs(self, out: Region) -> tuple[Region, ...]:
        """What lies inside."""
        n = len(self.low)
        return ((*out[: len(out) - n], *self.reading.needs(self._reach(out))),)

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Pad what lies outside."""
        return self.reading.read(crops[0], self._reach(out))

    def place(self, out: Region) -> Any:
        """How much lies outside."""
        return self.reading.beyond(self._reach(out))

    def _reach(self, out: Region) -> tuple[Interval, ...]:
        return tuple((a - p, b - p) for (a, b), p in zip(out[len(out) - len(self.low) :], self.low, strict=True))


@dataclass(frozen=True)
class Shuffle:
    """Channels become pixels (pixel shuffle) or pixels channels."""

    operands: tuple[Ref, ...]
    shape: tuple[int, ...]
    factor: int
    up: bool

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The pixels, of all channels."""
        r = self.factor
        pixels = [(a // r, -(-b // r)) if self.up else (a * r, b * r) for a, b in out[-2:]]
        return ((*out[:-3], (0, self.shape[-3]), *pixels),)

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Shuffle the crop and cut it."""
        if not self.up:
            return torch.nn.functional.pixel_unshuffle(crops[0], self.factor)
        made = torch.nn.functional.pixel_shuffle(crops[0], self.factor)
        for dim, (a, b) in zip((-2, -1), out[-2:], strict=True):
            made = made.narrow(dim, a % self.factor, b - a)
        return made

    def follow(self, operand: int, dim: int) -> int | None:
        """Pixels stay pixels."""
        return None if dim == len(self.shape) - 3 else dim

    def place(self, out: Region) -> Any:
        """The position among the pixels that one pixel becomes."""
        return tuple((a % self.factor, b - a) for a, b in out[-2:]) if self.up else None


@rule("permute", "transpose", "swapaxes", "swapdims", "movedim", "unsqueeze", "squeeze", "T", "mT", "t")
def _permute(call: StreamCall) -> PermuteRule:
    source = call.input()
    shape = call.shapes(source)
    rest = [*call.args[1:], *call.kwargs.values()]
    dims = list(range(len(shape)))
    order: list[int | None]
    if call.type in ("T", "mT", "t"):
        order = [*dims[:-2], *reversed(dims[-2:])] if call.type == "mT" else list(reversed(dims))
    elif call.type == "permute":
        order = [d % len(shape) for d in (rest[0] if isinstance(rest[0], (tuple, list)) else rest)]
    elif call.type == "unsqueeze":
        order = list(dims)
        order.insert(rest[0] % (len(shape) + 1), None)
    elif call.type == "squeeze":
        asked = [rest[0]] if rest and isinstance(rest[0], int) else list(rest[0]) if rest else dims
        order = [d for d in dims if not (shape[d] == 1 and d in [a % len(shape) for a in asked])]
    else:
        # Number the dimensions by sizes no other has, and see where they go.
        numbered = torch.empty([d + 2 for d in dims], device="meta")
        order = [n - 2 for n in call.target(numbered, *rest).shape]
    return PermuteRule((source,), shape, tuple(order))


@rule("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel")
def _reshape(call: StreamCall) -> ReshapeRule:
    if call.type == "view" and any(isinstance(a, torch.dtype) for a in call.args):
        raise NotStreamable("it reads the bytes as another dtype")
    return ReshapeRule((call.input(),), call.shapes(call.input()), call.shape)


@dataclass(frozen=True)
class _Stretch(Pointwise):
    """Dimensions of size one expanded to the wanted size."""

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Expand to the wanted size."""
        return crops[0].expand(sizes(out))


@rule("expand", "expand_as", "broadcast_to")
def _expand(call: StreamCall) -> Pointwise:
    source = call.input()
    return _Stretch((source,), (call.shapes(source),), len(call.shape), call.recall())


@rule("pad")
def _pad(call: StreamCall) -> Padding:
    source = call.input()
    if call.module is not None:
        m: Any = call.module
        amounts, value = tuple(m.padding), float(getattr(m, "value", 0) or 0)
        kinds = {"Zero": "constant", "Cons": "constant", "Refl": "reflect", "Repl": "replicate", "Circ": "circular"}
        mode = kinds[call.type[:4]]
    else:
        given = call.bound("input pad mode value", mode="constant", value=None)
        amounts, mode, value = tuple(given["pad"]), given["mode"], float(given["value"] or 0)
    border: Border = mode  # type: ignore[assignment]
    low = tuple(reversed(amounts[0::2]))
    shape = call.shapes(source)
    if math.prod(call.shape) == 0:
        raise NotStreamable("nothing is left")
    return Padding((source,), low, BorderedRegion(shape[len(shape) - len(low) :], border, value))


@rule("pixel_shuffle", "pixel_unshuffle")
def _shuffle(call: StreamCall) -> Shuffle:
    up = call.operation == "pixel_shuffle"
    m: Any = call.module
    if m is not None:
        factor = m.upscale_factor if up else m.downscale_factor
    else:
        factor = next(a for a in (*call.args[1:], *call.kwargs.values()) if isinstance(a, int))
    return Shuffle((call.input(),), call.shapes(call.input()), factor, up)
