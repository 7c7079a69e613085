"""A link of which collectives were timed: between the sizes that were probed, times lie on straight lines.

What a message takes is not a latency and a rate alone: over a slow link with a queue an all-gather of 8 MiB reached 62
% of the rate, and one of 128 KiB 95 %. So a table of sizes is kept for each collective, as NCCL's and gloo's own tests
print it, and training's sizes are looked up in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from outcore.machine import Device
from outcore.machine.link import Link
from outcore.whatif.links import ClusterLink

Points = tuple[tuple[float, float, float], ...]
"""Bytes, seconds, and seconds of a core."""


@dataclass(frozen=True)
class ProbedLink(ClusterLink):
    """What collectives took over a link between so many ranks."""

    probes: Mapping[str, Points] = field(default_factory=dict)
    crowd: float = 1.0
    """Ranks for each core of the machine that they share, if there are more of them than cores."""

    @classmethod
    def of(cls, name: str, probes: Mapping[str, Points], crowd: float = 1.0) -> ProbedLink:
        unused = Link.symmetric(bandwidth_bytes_per_s=1.0, latency_s=1.0)
        return cls(name, unused, trees=False, probes=probes, crowd=max(1.0, crowd))

    def all_reduce_s(self, nbytes: float, ranks: int) -> float:
        return between([(size, s) for size, s, _ in self.probes["all_reduce"]], nbytes)

    def gather_s(self, nbytes: float, ranks: int) -> float:
        return between([(size, s) for size, s, _ in self.probes["gather"]], nbytes)

    def scatter_s(self, nbytes: float, ranks: int) -> float:
        return between([(size, s) for size, s, _ in self.probes["scatter"]], nbytes)

    def core_s(self, nbytes: float, ranks: int, device: Device) -> float:
        return self.crowd * between([(size, core) for size, _, core in self.probes["all_reduce"]], nbytes)


def between(points: list[tuple[float, float]], at: float) -> float:
    """On the line between the two points around a place; beyond the last, on the last line.

    >>> between([(0.0, 1.0), (10.0, 2.0), (20.0, 6.0)], 15.0), between([(0.0, 1.0), (10.0, 2.0)], 30.0)
    (4.0, 4.0)
    """
    (left, low), (right, high) = next((pair for pair in pairwise(points) if at <= pair[1][0]), points[-2:])
    return max(0.0, low + (high - low) * (at - left) / (right - left))
