"""The links a simulated step uses, and when each of them is free.

Every rank sends and receives independently; a node has one link out and one in for all its ranks. A transfer occupies
both ends for as long as its bytes and the gap to the next message take, and arrives one latency later. Where ranks
share processors (several on one GPU, more than there are cores) a compute takes the first that is free, in the order in
which they ask: in truth they take turns, which ends at the same time when all have as much to do. Copies to and from
off-device storage have a direction each; when both are busy the later one gets what the first leaves of the rate of
both together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outcore.errors import ProgramError
from outcore.machine.link import Link
from outcore.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class Links:
    """How ranks are connected; a link that is not given takes no time.

    >>> links = Links(Link.symmetric(bandwidth_bytes_per_s=1e9, latency_s=1e-6))
    >>> LinkSchedule(links).transfer(0, 1, 1_000_000, ready_s=0.0)
    (0.0, 0.001, 0.001001)
    """

    between_devices: Link | None = None
    between_nodes: Link | None = None
    devices_per_node: int | None = None
    """None when all ranks are on one node."""
    host: Link | None = None
    """From a device to off-device storage and back."""
    processors: int | None = None
    """How many ranks of a node compute at the same time at full rate; None for all."""

    def __post_init__(self) -> None:
        if self.devices_per_node is not None and self.devices_per_node < 1:
            raise ProgramError(f"a node has {self.devices_per_node} devices; needed at least 1")
        if self.processors is not None and self.processors < 1:
            raise ProgramError(f"a node has {self.processors} processors; needed at least 1")

    @classmethod
    def of(cls, machine: Machine) -> Links:
        """The links of a machine; raises for one that it needs and does not know, instead of taking it as free."""
        for needed, link, name in (
            (len(machine.devices) > 1, machine.between_devices, "between_devices"),
            (machine.nodes > 1, machine.between_nodes, "between_nodes"),
        ):
            if needed and link is None:
                raise ProgramError(f"the link {name} of machine {machine.name!r} is not known; add it to its file")
        host = machine.host_link.pinned if machine.host_link is not None else machine.disk
        per_node = len(machine.devices) if machine.nodes > 1 else None
        return cls(machine.between_devices, machine.between_nodes, per_node, host, machine.processors)

    @classmethod
    def to_host(cls, out_bytes_per_s: float, in_bytes_per_s: float) -> Links:
        """One device and the slower tier below it."""
        return cls(host=Link(out_bytes_per_s, in_bytes_per_s, out_bytes_per_s + in_bytes_per_s))

    def node(self, rank: int) -> int:
        """The node a rank is on."""
        return 0 if self.devices_per_node is None else rank // self.devices_per_node

    def link(self, source: int, target: int) -> Link | None:
        """The one between two ranks."""
        return self.between_devices if self.node(source) == self.node(target) else self.between_nodes

    def between(self, source: int, target: int) -> tuple[float, float]:
        """Seconds per byte and latency from one rank to another."""
        link = self.link(source, target)
        return (0.0, 0.0) if link is None else (1 / link.away_bytes_per_s, link.latency_s)

    def host_s(self, source: int, target: int) -> float:
        """What a message from one rank to another takes of the host at either end."""
        link = self.link(source, target)
        return 0.0 if link is None else link.host_s


class LinkSchedule:
    """When each link is free, in the course of one simulated step; queried in the order of time."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._free: defaultdict[tuple[str, int], float] = defaultdict(float)
        self._copying: dict[tuple[int, str], tuple[float, float]] = {}
        self._busy: dict[int, list[float]] = {}

    def begin(self, rank: int, ready_s: float) -> float:
        """When a processor is free for a rank that could compute from `ready_s` on."""
        if self.links.processors is None:
            return ready_s
        busy = self._busy.setdefault(self.links.node(rank), [0.0] * self.links.processors)
        return max(ready_s, min(busy))

    def finish(self, rank: int, end_s: float) -> None:
        """Occupy the processor that `begin` has found until then."""
        if self.links.processors is not None:
            busy = self._busy[self.links.node(rank)]
            busy[busy.index(min(busy))] = end_s

    def handle(self, rank: int, seconds: float, ready_s: float) -> float:
        """When a rank's host has done its part of a message that it can begin at `ready_s`; it computes nothing
        meanwhile."""
        if not seconds:
            return ready_s
        end = self.begin(rank, ready_s) + seconds
        self.finish(rank, end)
        return end

    def transfer(self, source: int, target: int, nbytes: int, ready_s: float) -> tuple[float, float, float]:
        """Reserve a transfer that can begin at `ready_s`; returns its start, its end on the link, and its arrival."""
        ways = [("out", source), ("in", target)]
        if (out := self.links.node(source)) != (into := self.links.node(target)):
            ways += [("node out", out), ("node in", into)]
        per_byte, latency_s = self.links.between(source, target)
        link = self.links.link(source, target)
        start = max(ready_s, *(self._free[way] for way in ways))
        end = start + nbytes * per_byte + (0.0 if link is None else link.gap_s)
        for way in ways:
            self._free[way] = end
        return start, end, end + latency_s

    def reduce(self, group: Sequence[int], nbytes: int, ready_s: float) -> tuple[float, float]:
        """Reserve a ring all-reduce over a group; returns its start and end. Others may be under way in its latency."""
        size = len(group)
        if size < 2:
            return ready_s, ready_s
        hops = [(rank, group[(index + 1) % size]) for index, rank in enumerate(group)]
        costs = {self.links.between(*hop) for hop in hops}
        per_byte, latency_s = max(cost[0] for cost in costs), max(cost[1] for cost in costs)
        host_s = 2 * max(self.links.host_s(*hop) for hop in hops)  # in every round each sends and receives
        ways = [(way, rank) for rank in group for way in ("out", "in")]
        crossed = {self.links.node(rank) for hop in hops if len({*map(self.links.node, hop)}) > 1 for rank in hop}
        ways += [(way, node) for node in crossed for way in ("node out", "node in")]
        start = max(ready_s, *(self._free[way] for way in ways))
        adding = max(
            0.0 if link is None else link.adding_s_per_byte for link in (self.links.link(*hop) for hop in hops)
        )
        busy_until = start + 2 * (size - 1) * (host_s + nbytes / size * per_byte) + nbytes * adding
        for way in ways:
            self._free[way] = busy_until
        return start, busy_until + 2 * (size - 1) * latency_s

    def copy(self, rank: int, direction: Literal["away", "back"], nbytes: int, ready_s: float) -> tuple[float, float]:
        """Reserve a copy to or from off-device storage; returns its start and end."""
        start = max(ready_s, self._free[direction, rank])
        link = self.links.host
        if link is None:
            return start, start
        rates = {"away": link.away_bytes_per_s, "back": link.back_bytes_per_s}
        other = "back" if direction == "away" else "away"
        other_start, other_end = self._copying.get((rank, other), (0.0, 0.0))
        left = max(0.0, min(rates[direction], link.both_bytes_per_s - rates[other]))
        began, moved = start + link.latency_s, 0.0
        if other_start <= began < other_end:
            moved = left * (other_end - began)
            if moved >= nbytes > 0:
                began, moved = began + nbytes / left, float(nbytes)
            else:
                began = other_end
        end = began + (nbytes - moved) / rates[direction]
        self._free[direction, rank] = end
        self._copying[rank, direction] = (start, end)
        return start, end
