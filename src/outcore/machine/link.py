"""A link: how fast bytes move between two places.

One shape serves every pair that the planner weighs: a GPU and pinned or pageable host memory, a CPU and its
disk, two devices of a node, two nodes. *Away* is from the fast memory to the slow one (device to host,
write), *back* is the other way (host to device, read). `both_bytes_per_s` is the sum of the two directions
when they run at the same time, which is what decides whether evicting one value and fetching another really
overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from outcore.errors import MachineError

__all__ = ["Direction", "HostLink", "Link"]

Direction = Literal["away", "back", "both"]


@dataclass(frozen=True, slots=True)
class Link:
    """A two-way link with a latency and a rate for each direction.

    >>> pcie = Link.symmetric(bandwidth_bytes_per_s=25e9, latency_s=10e-6)
    >>> round(pcie.time_s(250_000_000, "away"), 5)
    0.01001
    """

    away_bytes_per_s: float
    back_bytes_per_s: float
    both_bytes_per_s: float
    """Bytes per second of the two directions together when both are busy."""
    latency_s: float = 0.0
    host_s: float = 0.0
    """Seconds in which a message keeps the host at either of its ends from computing: a call, a copy, a wake-up."""
    adding_s_per_byte: float = 0.0
    """What an all-reduce takes beside moving its bytes: to put gradients into a row, to add, to hand them back."""
    gap_s: float = 0.0
    """Seconds from one message to the next at either end, whatever their bytes (the gap of the LogP model)."""

    def __post_init__(self) -> None:
        rates = (self.away_bytes_per_s, self.back_bytes_per_s, self.both_bytes_per_s)
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise MachineError(f"a link needs three positive rates in bytes per second, got {rates}")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise MachineError(f"a link needs a latency of at least 0 seconds, got {self.latency_s}")
        if not (math.isfinite(self.host_s) and self.host_s >= 0):
            raise MachineError(f"a message takes at least 0 seconds of a host, got {self.host_s}")
        if not (math.isfinite(self.adding_s_per_byte) and self.adding_s_per_byte >= 0):
            raise MachineError(f"adding a byte takes at least 0 seconds, got {self.adding_s_per_byte}")
        if not (math.isfinite(self.gap_s) and self.gap_s >= 0):
            raise MachineError(f"messages follow each other in at least 0 seconds, got {self.gap_s}")

    @classmethod
    def symmetric(
        cls,
        *,
        bandwidth_bytes_per_s: float,
        latency_s: float = 0.0,
        duplex: bool = True,
        host_s: float = 0.0,
        adding_s_per_byte: float = 0.0,
        gap_s: float = 0.0,
    ) -> Link:
        """A link with the same rate each way; `duplex` says whether both ways at once double it."""
        both = bandwidth_bytes_per_s * (2 if duplex else 1)
        return cls(bandwidth_bytes_per_s, bandwidth_bytes_per_s, both, latency_s, host_s, adding_s_per_byte, gap_s)

    def time_s(self, nbytes: float, direction: Direction = "away") -> float:
        """Seconds to move `nbytes`; for "both", `nbytes` is the sum of the two directions."""
        rates = {
            "away": self.away_bytes_per_s,
            "back": self.back_bytes_per_s,
            "both": self.both_bytes_per_s,
        }
        return self.latency_s + nbytes / rates[direction]


@dataclass(frozen=True, slots=True)
class HostLink:
    """The link between a GPU and the memory of its host, which depends on how that memory was allocated."""

    pinned: Link
    pageable: Link
