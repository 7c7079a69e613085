"""Which input interval does an output interval depend on?

Half-open intervals of integers along one dimension, and for each kind of operation the exact map from what is wanted of
its output to what that takes of its input. Everything is integer arithmetic on the sizes of the *whole* tensors, so it
holds for any size, stride, dilation and padding, and for operations such as interpolation whose positions depend on the
size of the whole.

    wanted of the output         [lo, hi)
    reach: what it touches       [lo * stride - low, (hi - 1) * stride - low + dilation * (kernel - 1) + 1)
    needs: what of it exists     reach cut off at 0 and size; what lies outside is padding

A *region* is one interval per dimension of a tensor, batch and channels included; most operations want some dimensions
whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Interval = tuple[int, int]
Region = tuple[Interval, ...]
Border = Literal["zeros", "constant", "reflect", "replicate", "circular"]


def whole(shape: Iterable[int]) -> Region:
    """All of a tensor."""
    return tuple((0, n) for n in shape)


def sizes(region: Region) -> tuple[int, ...]:
    """The shape of what a region cuts out."""
    return tuple(hi - lo for lo, hi in region)


def elements(region: Region) -> int:
    """How many numbers a region holds."""
    return math.prod(sizes(region))


def cover(a: Region | None, b: Region) -> Region:
    """The smallest region that holds both."""
    return b if a is None else tuple((min(p, r), max(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))


def clip(interval: Interval, size: int) -> Interval:
    """What of an interval lies inside [0, size); at least one element, the nearest, where it lies outside."""
    lo = min(max(interval[0], 0), size - 1)
    return lo, min(max(interval[1], lo + 1), size)


def inside(reach: Interval, size: int, border: Border) -> Interval:
    """What of [0, size) a reach needs, given what stands beyond the border."""
    lo, hi = clip(reach, size)
    low, high = max(0, -reach[0]), max(0, reach[1] - size)
    if border == "circular" and (low or high):
        return 0, size
    if border == "reflect":
        return min(lo, size - 1 - high if high else lo), max(hi, low + 1 if low else hi)
    return lo, hi


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A window that slides over the input: convolutions and pools."""

    size: int
    kernel: int
    stride: int
    dilation: int
    low: int
    """Padding before the first element."""

    def reach(self, wanted: Interval) -> Interval:
        """The input positions under the windows, those beyond the border included."""
        start = wanted[0] * self.stride - self.low
        return start, (wanted[1] - 1) * self.stride - self.low + self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True, slots=True)
class TransposedWindow:
    """An input element adds to a window of the output: transposed convolutions."""

    size: int
    kernel: int
    stride: int
    dilation: int
    low: int
    """What is cut off before the first output."""

    def needs(self, wanted: Interval) -> Interval:
        """The input elements that add to the wanted outputs, and where the first of them begins to add."""
        span = self.dilation * (self.kernel - 1)
        first = -((-(wanted[0] + self.low - span)) // self.stride)
        first = min(first, (wanted[0] + self.low) // self.stride)
        return clip((first, (wanted[1] - 1 + self.low) // self.stride + 1), self.size)

    def start(self, given: Interval) -> int:
        """The output position where the first given input begins to add."""
        return given[0] * self.stride - self.low


@dataclass(frozen=True, slots=True)
class AdaptiveWindow:
    """Adaptive pools: output i is over the inputs from floor(i n / m) to ceil((i + 1) n / m)."""

    size: int
    bins: int

    def bin(self, index: int) -> Interval:
        """The inputs of one output."""
        return index * self.size // self.bins, -((-(index + 1) * self.size) // self.bins)

    def needs(self, wanted: Interval) -> Interval:
        """The inputs of an interval of outputs."""
        return self.bin(wanted[0])[0], self.bin(wanted[1] - 1)[1]


@dataclass(frozen=True, slots=True)
class InterpolationWindow:
    """Interpolation: each output is a weighted sum of a few inputs at a position that depends on the whole size."""

    size: int
    new_size: int
    mode: Literal["nearest", "nearest-exact", "linear", "cubic"]
    align: bool
    scale: float | None
    """Outputs per input, if the user gave it; else it follows from the sizes."""

    @property
    def factor(self) -> int | None:
        """The whole number it enlarges by, if it is one and positions repeat with it."""
        exact = self.new_size % self.size == 0 and not self.align
        factor = self.new_size // self.size
        return factor if exact and self.scale in (None, float(factor)) else None

    @property
    def margin(self) -> int:
        """Inputs needed beside the nearest one."""
        return {"nearest": 0, "nearest-exact": 0, "linear": 1, "cubic": 2}[self.mode]

    def position(self, index: int) -> float:
        """Where on the input an output lies."""
        if self.align:
            return index * (self.size - 1) / (self.new_size - 1) if self.new_size > 1 else 0.0
        step = 1.0 / self.scale if self.scale else self.size / self.new_size
        return index * step if self.mode == "nearest" else (index + 0.5) * step - 0.5

    def taps(self, index: int) -> list[tuple[int, float]]:
        """The inputs of one output with their weights."""
        at = self.position(index)
        if self.mode == "nearest":
            return [(min(math.floor(at + 1e-9), self.size - 1), 1.0)]
        if self.mode == "nearest-exact":
            return [(min(math.floor(at + 0.5 + 1e-9), self.size - 1), 1.0)]
        at = max(at, 0.0) if self.mode == "linear" and not self.align else at
        base = math.floor(at)
        part = at - base
        if self.mode == "linear":
            base = min(base, self.size - 1)
            return [(base, 1 - part), (min(base + 1, self.size - 1), part)]
        weights = (_cubic(part + 1), _cubic(part), _cubic(1 - part), _cubic(2 - part))
        return [(min(max(base + i - 1, 0), self.size - 1), w) for i, w in enumerate(weights)]

    def needs(self, wanted: Interval) -> Interval:
        """The inputs that an interval of outputs is made from."""
        if (factor := self.factor) is not None:
            near = wanted[0] // factor - self.margin, (wanted[1] - 1) // factor + 1 + self.margin
            return clip(near, self.size)
        ends = [i for index in (wanted[0], wanted[1] - 1) for i, _ in self.taps(index)]
        return min(ends), max(ends) + 1


def _cubic(x: float, a: float = -0.75) -> float:
    """Keys' kernel with the coefficient torch uses."""
    if x <= 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
