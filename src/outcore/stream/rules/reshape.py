"""Reshaping, region by region.

Both shapes are split into the smallest groups of neighbouring dimensions with the same number of elements: pixels
stay in groups of their own, channels may be split and merged. Inside a group elements are in row-major order, so a
region of the output is covered by one run of the flat order, and that run by one region of the input.

    (4, 6, 10) -> (2, 2, 60)    groups (4 | 2 2) (6 10 | 60)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from outcore.graph.record.recording import Ref
from outcore.ops.region import Interval, Region, sizes
from outcore.stream.call import NotStreamable, RuleContext

Group = tuple[tuple[int, ...], tuple[int, ...]]
"""Neighbouring dimensions of the operand, and of the output, with as many elements."""


@dataclass(frozen=True)
class ReshapeRule:
    """The same elements in row-major order under another shape."""

    operands: tuple[Ref, ...]
    shape: tuple[int, ...]
    new_shape: tuple[int, ...]

    @cached_property
    def groups(self) -> list[Group]:
        """How dimensions of the one belong to those of the other."""
        return _groups(self.shape, self.new_shape)

    def needs(self, out: Region) -> tuple[Region, ...]:
        """What covers the runs that cover the wanted regions."""
        found: list[Interval] = [(0, n) for n in self.shape]
        for old, new in self.groups:
            lengths = [self.new_shape[d] for d in new]
            rows = _cover(_run([out[d] for d in new], lengths), lengths)
            for dim, interval in zip(old, _cover(_run(rows, lengths), [self.shape[d] for d in old]), strict=True):
                found[dim] = interval
        return (tuple(found),)

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Each group flat, cut to the run, in its new shape, cut to what is wanted."""
        (held,) = self.needs(out)
        flat = crops[0].reshape([math.prod(sizes(tuple(held[d] for d in old))) for old, _ in self.groups])
        shape: list[int] = []
        boxes: list[Interval] = []
        for i, (old, new) in enumerate(self.groups):
            start = _run([held[d] for d in old], [self.shape[d] for d in old])[0]
            lengths = [self.new_shape[d] for d in new]
            box = _cover(_run([out[d] for d in new], lengths), lengths)
            lo, hi = _run(box, lengths)
            flat = flat.narrow(i, lo - start, hi - lo)
            shape += [b - a for a, b in box]
            boxes += box
        made = flat.reshape(shape)
        for dim, ((a, b), (lo, hi)) in enumerate(zip(boxes, out, strict=True)):
            if (a, b) != (lo, hi):
                made = made.narrow(dim, lo - a, hi - lo)
        return made

    def follow(self, operand: int, dim: int) -> int | None:
        """Through a group: the outermost dimension of size above one stays outermost."""
        for old, new in self.groups:
            if dim in old:
                before = [d for d in old if self.shape[d] > 1]
                after = [d for d in new if self.new_shape[d] > 1]
                return after[0] if before and after and before[0] == dim and len(after) >= 1 else None
        return None

    def place(self, out: Region) -> Any:
        """The position, where dimensions are joined or split: it says which runs of elements are taken."""
        return None if all(len(old) == 1 == len(new) for old, new in self.groups) else out


def _groups(shape: tuple[int, ...], new_shape: tuple[int, ...]) -> list[Group]:
    found: list[Group] = []
    i = j = 0
    while i < len(shape) or j < len(new_shape):
        old, new = [], []
        a = b = 1
        if i < len(shape):
            old, a, i = [i], shape[i], i + 1
        if j < len(new_shape):
            new, b, j = [j], new_shape[j], j + 1
        while a != b:
            if a < b and i < len(shape):
                old.append(i)
                a, i = a * shape[i], i + 1
            elif j < len(new_shape):
                new.append(j)
                b, j = b * new_shape[j], j + 1
            else:
                raise NotStreamable(f"no way from shape {shape} to {new_shape}")
        found.append((tuple(old), tuple(new)))
    return found


def _run(box: Sequence[Interval], lengths: Sequence[int]) -> Interval:
    """The flat positions from the first to the last element of a box."""
    first = last = 0
    for (a, b), n in zip(box, lengths, strict=True):
        first, last = first * n + a, last * n + b - 1
    return first, last + 1


def _cover(run: Interval, lengths: Sequence[int]) -> list[Interval]:
    """The smallest box of whole rows that holds a run."""
    box: list[Interval] = []
    first, last = run[0], run[1] - 1
    apart = False
    for d, n in enumerate(lengths):
        rest = math.prod(lengths[d + 1 :])
        a, first = divmod(first, rest)
        b, last = divmod(last, rest)
        box.append((0, n) if apart else (a, b + 1))
        apart = apart or a != b
    return box
