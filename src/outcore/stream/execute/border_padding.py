"""Padding on both sides of a tile, and the excess that it gives.

A tile at the border of the image pads on one side only, which convolutions and pools cannot do: the crop would have to
be copied into a larger one, in both passes, and the copy saved for backward. Padding *both* sides instead gives the
wanted values and a few more at the inner side, computed from zeros that should have been the neighbour's pixels:

    held       |=================|            the crop, the image ends on its left
    padded    o|=================|o
    given      [ wanted        ]xx            x is excess: nothing reads it, its gradient is zero

Excess is carried along by operations that would otherwise have to copy their input, and dropped where something is
copied anyway. Invariant: wanted values depend on wanted values only, so they are exact. Excess grows with every layer;
where it would be more than a small share of the work, the crop is cut and copied after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.ops.region import Interval, Region, SlidingWindow, elements

_MOST = 1.06
"""Elements computed for each wanted one, at most: a copy costs about as much as this share of a convolution."""


@dataclass(frozen=True)
class WidenedInput:
    """How an operation is run on all that is held of its first operand."""

    padding: tuple[int, ...]
    """On both sides of every pixel dimension."""
    out: Region
    """The region of the result, wanted and excess; may lie outside of the image."""


def window_excess(window: SlidingWindow, held: Interval, wanted: Interval) -> tuple[int, Interval] | None:
    """The padding on both sides with which a window gives what is wanted from what is held, and all that it gives.

    >>> window_excess(SlidingWindow(size=100, kernel=3, stride=1, dilation=1, low=1), held=(0, 41), wanted=(0, 40))
    (1, (0, 41))
    >>> window_excess(SlidingWindow(size=100, kernel=3, stride=1, dilation=1, low=1), held=(39, 61), wanted=(40, 60))
    (0, (40, 60))
    """
    (start, stop), (a, b) = window.reach(wanted), held
    low, high = max(0, -start), max(0, stop - window.size)
    if (low and a != 0) or (high and b != window.size):
        return None  # excess where zeros should be
    needed, span = max(low, high), window.dilation * (window.kernel - 1) + 1
    padding = needed + (a - needed - start) % window.stride  # so that windows are aligned
    if padding > needed and padding >= span:
        return None  # a window would lie in padding alone, for which libraries have only slow kernels
    before = start - (a - padding)
    count = (b - a + 2 * padding - span) // window.stride + 1
    first = wanted[0] - before // window.stride
    return padding, (first, first + count)


def worthwhile(out: Region, wanted: Region) -> bool:
    """Whether the excess is a small share."""
    return elements(out) <= _MOST * elements(wanted)


def contains(held: Region, region: Region) -> bool:
    """Whether all of a region is held."""
    return all(a <= lo and hi <= b for (a, b), (lo, hi) in zip(held, region, strict=True))


def windows_excess(windows: Sequence[SlidingWindow], held: Region, out: Region) -> WidenedInput | None:
    """The same for one window per pixel dimension, which are the last ones."""
    count = len(windows)
    found = [window_excess(w, h, o) for w, h, o in zip(windows, held[-count:], out[-count:], strict=True)]
    sides = [side for side in found if side is not None]
    if len(sides) < count:
        return None
    widened = WidenedInput(tuple(p for p, _ in sides), (*out[:-count], *(o for _, o in sides)))
    return widened if worthwhile(widened.out, out) else None
