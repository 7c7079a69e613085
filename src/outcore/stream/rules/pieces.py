"""Joining tensors, and taking pieces of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outcore.graph.record.recording import Ref
from outcore.ops.region import Region, clip
from outcore.stream.call import NotStreamable, PlainRule, RuleContext, StreamCall, rule


@dataclass(frozen=True)
class Join:
    """Tensors one after the other along a dimension."""

    operands: tuple[Ref, ...]
    lengths: tuple[int, ...]
    dim: int

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The wanted region of each part; one element of a part of which none is wanted, since it must be something."""
        found, start = [], 0
        lo, hi = out[self.dim]
        for n in self.lengths:
            found.append((*out[: self.dim], clip((lo - start, hi - start), n), *out[self.dim + 1 :]))
            start += n
        return tuple(found)

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Join the parts that are wanted."""
        wanted, start = [], 0
        lo, hi = out[self.dim]
        for crop, n in zip(crops, self.lengths, strict=True):
            if lo < start + n and hi > start:
                wanted.append(crop)
            start += n
        return wanted[0] if len(wanted) == 1 else torch.cat(wanted, self.dim)

    def follow(self, operand: int, dim: int) -> int | None:
        """Along the joint, a part is a piece of the whole."""
        return None if dim == self.dim else dim

    def place(self, out: Region) -> Any:
        """The position along the joint: it says which of the joined tensors are read."""
        return out[self.dim]


@dataclass(frozen=True)
class Slice(PlainRule):
    """A piece of a tensor: per dimension a start and a step, or one index (which drops the dimension)."""

    operands: tuple[Ref, ...]
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int, int | None], ...]
    """Per dimension of the operand: start, step, and the dimension of the output it becomes."""
    rank: int

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The elements from the first to the last that is wanted."""
        found = []
        for start, step, to in self.parts:
            lo, hi = (0, 1) if to is None else out[to]
            found.append((start + lo * step, start + (hi - 1) * step + 1))
        return (tuple(found),)

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Take every step-th element."""
        taken = crops[0][tuple(slice(None, None, step) if to is not None else 0 for _, step, to in self.parts)]
        kept = {to for _, _, to in self.parts}
        for dim in range(self.rank):
            if dim not in kept:
                taken = taken.unsqueeze(dim)
        return taken

    def follow(self, operand: int, dim: int) -> int | None:
        """Dimensions of which one index is taken are gone."""
        return self.parts[dim][2]


@rule("cat")
def _join(call: StreamCall) -> Join:
    given = call.bound("tensors dim", dim=0)
    parts = given["tensors"]
    if not all(isinstance(p, Ref) for p in parts):
        raise NotStreamable("it joins something else than tensors")
    dim = given["dim"] % len(call.shape)
    for part in parts:
        if dim in call.streamed(part):
            raise NotStreamable("it joins images along a streamed dimension")
    return Join(tuple(parts), tuple(call.shapes(p)[dim] for p in parts), dim)


@rule("getitem")
def _getitem(call: StreamCall) -> Slice:
    source, index = call.input(), call.args[1]
    shape = call.shapes(source)
    index = index if isinstance(index, tuple) else (index,)
    if not all(i is None or i is Ellipsis or (isinstance(i, (int, slice)) and not isinstance(i, bool)) for i in index):
        raise NotStreamable("it takes elements by a list or a mask")
    used = sum(i is not None and i is not Ellipsis for i in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    at = index.index(Ellipsis)
    index = (*index[:at], *(slice(None),) * (len(shape) - used), *index[at + 1 :])
    parts: list[tuple[int, int, int | None]] = []
    to = 0
    for i in index:
        if i is None:
            to += 1
        elif isinstance(i, int):
            parts.append((i % shape[len(parts)], 1, None))
        else:
            start, _, step = i.indices(shape[len(parts)])
            parts.append((start, step, to))
            to += 1
    return Slice((source,), shape, tuple(parts), len(call.shape))


@rule("narrow")
def _narrow(call: StreamCall) -> Slice:
    given = call.bound("input dim start length")
    return _piece(call, given["input"], given["dim"], given["start"])


@rule("chunk", "split", "tensor_split", "unbind")
def _pieces(call: StreamCall) -> Slice:
    given = call.bound("input count dim", dim=0)
    source, dim = given["input"], given["dim"]
    if call.type == "unbind":
        dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
        shape = call.shapes(source)
        dim %= len(shape)
        order = [d for d in range(len(shape)) if d != dim]
        parts = tuple((call.index, 1, None) if d == dim else (0, 1, order.index(d)) for d in range(len(shape)))
        return Slice((source,), shape, parts, len(call.shape))
    return _piece(call, source, dim, sum(call.lengths[: call.index]))


def _piece(call: StreamCall, source: Ref, dim: int, start: int) -> Slice:
    shape = call.shapes(source)
    dim %= len(shape)
    return Slice((source,), shape, tuple((start if d == dim else 0, 1, d) for d in range(len(shape))), len(shape))
