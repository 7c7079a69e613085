"""Overhang: what a padded operation gives beyond what a tile wants of it.

A tile at the border of the image pads on one side only, which convolutions and pools cannot do: the crop would have to
be copied into a larger one, in both passes, and the copy kept for backward. Padding *both* sides instead gives the
wanted numbers and a few more at the inner side, made of zeros that should have been the neighbour's pixels:

    held       |=================|            the crop, the image ends on its left
    padded    o|=================|o
    given      [ wanted        ]xx            x is overhang: nobody reads it, its gradient is zero

Overhang is carried along by operations that would otherwise have to copy what they are given, and dropped where
something is copied anyway. Invariant: what is wanted depends on what was wanted alone, so it is exact. Overhang grows
with every layer; where it would be more than a small share of the work, the crop is cut and copied after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.ops.region import Interval, Region, SlidingWindow, elements

__all__ = ["WidenedInput", "contains", "window_overhang", "windows_overhang", "worthwhile"]

_MOST = 1.06
"""Numbers computed for each wanted one, at most: a copy costs about as much as this share of a convolution."""


@dataclass(frozen=True)
class WidenedInput:
    """How an operation is run on all that is held of its first operand."""

    padding: tuple[int, ...]
    """On both sides of every dimension of pixels."""
    out: Region
    """What comes out, wanted and overhang; may lie outside of the image."""


def window_overhang(window: SlidingWindow, held: Interval, wanted: Interval) -> tuple[int, Interval] | None:
    """The padding on both sides with which a window gives what is wanted from what is held, and all that it gives.

    >>> window_overhang(SlidingWindow(size=100, kernel=3, stride=1, dilation=1, low=1), held=(0, 41), wanted=(0, 40))
    (1, (0, 41))
    >>> window_overhang(SlidingWindow(size=100, kernel=3, stride=1, dilation=1, low=1), held=(39, 61), wanted=(40, 60))
    (0, (40, 60))
    """
    (start, stop), (a, b) = window.reach(wanted), held
    low, high = max(0, -start), max(0, stop - window.size)
    if (low and a != 0) or (high and b != window.size):
        return None  # overhang where zeros should be
    needed, span = max(low, high), window.dilation * (window.kernel - 1) + 1
    padding = needed + (a - needed - start) % window.stride  # so that windows lie where they should
    if padding > needed and padding >= span:
        return None  # a window would lie in padding alone, for which libraries have only slow kernels
    before = start - (a - padding)
    count = (b - a + 2 * padding - span) // window.stride + 1
    first = wanted[0] - before // window.stride
    return padding, (first, first + count)


def worthwhile(out: Region, wanted: Region) -> bool:
    """Whether the overhang is a small share."""
    return elements(out) <= _MOST * elements(wanted)


def contains(held: Region, region: Region) -> bool:
    """Whether all of a region is held."""
    return all(a <= lo and hi <= b for (a, b), (lo, hi) in zip(held, region, strict=True))


def windows_overhang(windows: Sequence[SlidingWindow], held: Region, out: Region) -> WidenedInput | None:
    """The same for one window per dimension of pixels, which are the last ones."""
    count = len(windows)
    found = [window_overhang(w, h, o) for w, h, o in zip(windows, held[-count:], out[-count:], strict=True)]
    sides = [side for side in found if side is not None]
    if len(sides) < count:
        return None
    widened = WidenedInput(tuple(p for p, _ in sides), (*out[:-count], *(o for _, o in sides)))
    return widened if worthwhile(widened.out, out) else None
