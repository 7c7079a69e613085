"""When values that leave the device are gone, and when they begin to come back.

One copy runs at a time each way, beside the kernels, in the order of the values' making on the way out and of their
first reading on the way back. A copy out begins when its value is made; its memory is free after the first kernel by
whose end the copy is over. A copy back begins as late as it can and still be over, with some reserve, when its value is
read; memory is taken when it begins. What does not fit beside the kernels is waited for: at the end of the forward, and
before the reader in the backward.

    forward   kernels  ─a──b──c──d──e─┤          backward  ├─e'──d'──c'──b'──a'─
              copies     └a out┘└─c out─┘ wait             wait └ c back┘ └a back┘
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["CopiesBack", "CopiesOut", "copies_back", "copies_out"]

EARLY = 1.3
"""A copy back begins so many times its length before its value is read."""


@dataclass(frozen=True)
class CopiesOut:
    """When the values that a forward copies out have left the device."""

    free_after: dict[int, int]
    """By value, the number of the kernel after which its memory is free; that of the last plus one for the end."""
    wait_s: float
    """Seconds that the end of the forward waits for the last copies."""


@dataclass(frozen=True)
class CopiesBack:
    """When the copies that a backward needs begin, and what it waits for them."""

    fetch_before: dict[int, int]
    """By value, the number of the kernel before which its copy begins."""
    wait_s: float
    """Seconds that kernels wait for copies, all together."""


def copies_out(
    seconds: Sequence[float], made: Mapping[int, int], last_read: Mapping[int, int], copy_s: Mapping[int, float]
) -> CopiesOut:
    """The copies of a forward.

    Args:
        seconds: of each kernel.
        made: by value, the kernel that makes it.
        last_read: by value, the last kernel that reads it, where one does.
        copy_s: by value, how long its copy takes.
    """
    ends = list(itertools.accumulate(seconds))
    free, clock = {}, 0.0
    for value, kernel in sorted(made.items(), key=lambda item: (item[1], item[0])):
        clock = max(clock, ends[kernel]) + copy_s[value]
        over = bisect.bisect_left(ends, clock * (1 - 1e-9))
        free[value] = max(over, last_read.get(value, kernel), kernel)
    return CopiesOut(free, max(0.0, clock - (ends[-1] if ends else 0.0)))


def copies_back(
    seconds: Sequence[float], first_read: Mapping[int, int], copy_s: Mapping[int, float], early: float = EARLY
) -> CopiesBack:
    """The copies of a backward.

    Args:
        seconds: of each kernel.
        first_read: by value, the first kernel that reads it.
        copy_s: by value, how long its copy takes.
        early: how many times its length a copy begins ahead; 0 for directly before its reader.
    """
    starts = [0.0, *itertools.accumulate(seconds)]
    order = sorted(first_read, key=lambda value: (first_read[value], value))
    fetch: dict[int, int] = {}
    ahead = float("inf")
    for value in reversed(order):
        ahead = min(ahead, starts[first_read[value]]) - early * copy_s[value]
        fetch[value] = min(first_read[value], max(0, bisect.bisect_right(starts, ahead) - 1))
    free = waited = 0.0
    for value in order:
        free = max(free, starts[fetch[value]] + waited) + copy_s[value]
        waited += max(0.0, free - (starts[first_read[value]] + waited))
    return CopiesBack(fetch, waited)
