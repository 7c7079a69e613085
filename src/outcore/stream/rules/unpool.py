"""Maximum pools that tell where each maximum was, and unpooling, which puts values back there.

A position is the flat index of a maximum in the whole image, so one that a region's pool finds is moved by where the
region lies. Unpooling has a rule where positions come from a pool of the same windows that do not overlap: then an
element of the output can only come from the one window that covers it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outcore.graph.record.recording import Ref
from outcore.ops.region import Interval, Region, SlidingWindow, sizes
from outcore.ops.registry import kinds, spatial_dims
from outcore.stream.call import NotStreamable, PlainRule, RuleContext, StreamCall, rule
from outcore.stream.rules.convolve import each
from outcore.stream.rules.pool import MAX_POOLS, MaxPool, max_windows


@dataclass(frozen=True)
class MaxPositions(MaxPool):
    """Where in the whole image the maximum of each window is."""

    def widened(self, held: Region, out: Region) -> None:
        """Never: excess would have to be told from the image."""

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Pool the crop, and move what it finds to its place in the image."""
        reach = self._reach(out)
        x = self.reading.read(crops[0].detach(), reach)
        kernel, stride = [w.kernel for w in self.windows], [w.stride for w in self.windows]
        dilation = [w.dilation for w in self.windows]
        _, found = MAX_POOLS[len(kernel)](x, kernel, stride, 0, dilation, return_indices=True)
        return _moved(found, x.shape[-len(kernel) :], reach, tuple(w.size for w in self.windows))


@dataclass(frozen=True)
class Unpool(PlainRule):
    """Values at the positions of the maxima, zeros elsewhere."""

    operands: tuple[Ref, ...]
    windows: tuple[SlidingWindow, ...]
    """Of the pool that the positions come from."""
    shape: tuple[int, ...]
    """Of the output's pixels."""
    pooled: tuple[int, ...]

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The windows that cover the wanted pixels, of values and positions."""
        count = len(self.windows)
        sides = [_windows_over(w, i, n) for w, i, n in zip(self.windows, out[-count:], self.pooled, strict=True)]
        region = (*out[:-count], *sides)
        return region, region

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Put the values that belong here to their place in the region."""
        values, positions = crops
        count = len(self.windows)
        place = torch.zeros_like(positions)
        inside = torch.ones_like(positions, dtype=torch.bool)
        left = positions
        steps = []
        for n in reversed(self.shape):
            steps.append(left % n)
            left = left // n
        for at, (lo, hi) in zip(reversed(steps), out[-count:], strict=True):
            inside &= (at >= lo) & (at < hi)
            place = place * (hi - lo) + (at - lo)
        pixels = sizes(out[-count:])
        total = math.prod(pixels)
        lead = values.shape[:-count]
        # What belongs to other regions is put behind the end, and cut off.
        place = torch.where(inside, place, total).reshape(*lead, -1)
        made = values.new_zeros(*lead, total + 1).scatter(-1, place, values.reshape(*lead, -1))
        return made[..., :total].reshape(*lead, *pixels)

    def place(self, out: Region) -> Any:
        """Positions are those of the whole image."""
        return out


def _windows_over(window: SlidingWindow, wanted: Interval, count: int) -> Interval:
    first = max(0, min((wanted[0] + window.low) // window.stride, count - 1))
    last = max(first, min((wanted[1] - 1 + window.low) // window.stride, count - 1))
    return first, last + 1


def _moved(found: torch.Tensor, local: Sequence[int], reach: Sequence[Interval], whole: Sequence[int]) -> torch.Tensor:
    """Flat positions in a crop as flat positions in the image."""
    left, steps = found, []
    for n in reversed(local):
        steps.append(left % n)
        left = left // n
    made = torch.zeros_like(found)
    for at, (start, _), n in zip(reversed(steps), reach, whole, strict=True):
        made = made * n + (at + start)
    return made


@rule(*kinds("max pool"))
def _max_pool(call: StreamCall) -> MaxPool:
    return (MaxPositions if call.index else MaxPool)(*max_windows(call))


@rule(*kinds("unpool"))
def _unpool(call: StreamCall) -> Unpool:
    given = call.given()
    refs = call.tensors() if call.module is not None else (given["input"], given["indices"])
    count = spatial_dims(call.type)
    kernel = each(given["kernel_size"], count)
    stride = each(given["stride"], count) if given["stride"] not in (None, [], ()) else kernel
    low = each(given["padding"] or 0, count)
    if any(s < k for s, k in zip(stride, kernel, strict=True)):
        raise NotStreamable("its windows overlap, so a pixel may come from several")
    pixels = call.shape[-count:]
    windows = tuple(SlidingWindow(*w) for w in zip(pixels, kernel, stride, (1,) * count, low, strict=True))
    pool = call.maker(refs[1])
    if not isinstance(pool, MaxPositions) or pool.windows != windows:
        raise NotStreamable("its positions do not come from a maximum pool with the same windows")
    return Unpool(refs[:2], windows, tuple(pixels), call.shapes(refs[0])[-count:])
