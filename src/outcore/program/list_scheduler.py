"""A list scheduler: makes an order of computing from stage times, a memory cap and a rule of preference.

Time runs; whenever a rank is free, it begins the most preferred of the computes that could begin there: the next
forward or backward, in micro-batch order, of each stage it holds. A forward also needs room: at most `window`
micro-batches are under way at a time, and what a rank holds for backward stays below its cap. The result is only an
order; what it takes, with transfers competing for links and buffers counted, the simulator says.

The placement is that of plain pipelines (stage s on rank s) or of GEMS (two inverted replicas, micro-batches in
turn). With inverted replicas a cap can leave every rank waiting for room on another; such a try is given up and None
returned.

`synthesised_orders` tries every rule with several windows and both placements; `planner/pipeline/order_search.py`
simulates what comes out and takes the fastest order within the cap.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outcore.program.instructions import Backward, Compute, Forward
from outcore.program.simulator.links import Links
from outcore.program.stages import Stages

Rule = Callable[[bool, float, int, float], tuple[float, ...]]
"""From whether it is a backward, the longest time from it to the end, its micro-batch and the time of the busiest rank
for one micro-batch, to a priority: the greatest begins."""

Token = tuple[type[Compute], int, int]
"""A forward or backward of a stage and micro-batch, which an arrival is for."""

SchedulerEvent = tuple[float, int, Compute | None, Token | None]
"""Time, rank, the compute that ends, what arrives."""

RULES: Mapping[str, Rule] = {
    "backward first": lambda backward, remaining_s, number, busiest_s: (backward, -number),
    "oldest first": lambda backward, remaining_s, number, busiest_s: (-number, backward),
    "forward first": lambda backward, remaining_s, number, busiest_s: (not backward, -number),
    "longest way": lambda backward, remaining_s, number, busiest_s: (remaining_s, -number),
    "longest way, in pace": lambda backward, remaining_s, number, busiest_s: (
        remaining_s - number * busiest_s,
        backward,
    ),
}
"""All rules of preference, by name."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The settings of one try of the list scheduler."""

    rule: str
    window: int
    inverted: bool
    memory_bytes: tuple[int, ...] | None = None
    """For each rank."""


def synthesised_orders(
    stages: Stages, micro_batches: int, caps: tuple[int, ...] | None, links: Links
) -> Iterator[tuple[SchedulerSettings, list[list[Compute]]]]:
    """Every order that the list scheduler finds for one pipeline, once, with the settings that gave it.

    Args:
        stages: the network, one stage to a rank.
        micro_batches: in the step.
        caps: the bytes that each rank may hold; None for no cap.
        links: between the ranks.
    """
    seen: set[tuple[tuple[Compute, ...], ...]] = set()
    for inverted in (False, True) if micro_batches > 1 and len(stages) > 1 else (False,):
        for window in _windows(micro_batches, len(stages)):
            for rule in RULES:
                setting = SchedulerSettings(rule, window, inverted, caps)
                orders = list_schedule(stages, micro_batches, setting, links)
                if orders is not None and (order := tuple(map(tuple, orders))) not in seen:
                    seen.add(order)
                    yield setting, orders


def _windows(micro_batches: int, depth: int) -> list[int]:
    """How many micro-batches may be under way at a time: the numbers that are worth a try, in ascending order."""
    wanted = {1, 2, 3, 4, 6, 8, 12, 16, depth - 1, depth, depth + 1, 2 * depth, micro_batches}
    return sorted(window for window in wanted if 1 <= window <= micro_batches)


def list_schedule(
    stages: Stages, micro_batches: int, setting: SchedulerSettings, links: Links
) -> list[list[Compute]] | None:
    """The order of each rank of one pipeline, or None when the setting leads to a deadlock."""
    return _Listing(stages, micro_batches, setting, links).run()


class _Listing:
    def __init__(self, stages: Stages, micro_batches: int, setting: SchedulerSettings, links: Links) -> None:
        self.stages, self.setting, self.links = stages, setting, links
        self.incoming, self.outgoing = stages.incoming(), stages.outgoing()
        self.depth, self.count = len(stages), micro_batches
        self.rule = RULES[setting.rule]
        self.numbers = [range(replica, micro_batches, self.replicas) for replica in range(self.replicas)]
        self.ways_s = _remaining_times(stages)
        self.holds = [
            [(self.depth - 1 - rank if replica else rank, replica) for replica in range(self.replicas)]
            for rank in range(self.depth)
        ]
        self.busiest_s = max(
            sum(stages.stages[s].forward_s + stages.stages[s].backward_s for s, _ in held) / self.replicas
            for held in self.holds
        )
        self.next = {(kind, s, r): 0 for held in self.holds for s, r in held for kind in (Forward, Backward)}
        self.missing: dict[Token, int] = {}
        for stage in range(self.depth):
            users = sum(len(edge.targets) for edge in self.outgoing[stage] if edge.has_gradient)
            for number in range(micro_batches):
                self.missing[Forward, stage, number] = len(self.incoming[stage])
                self.missing[Backward, stage, number] = users + 1
        self.under_way: dict[int, int] = {}
        self.free = [self._room(rank) for rank in range(self.depth)]
        self.busy = [False] * self.depth
        self.orders: list[list[Compute]] = [[] for _ in range(self.depth)]
        self.events: list[tuple[float, int, int, Compute | None, Token | None]] = []

    @property
    def replicas(self) -> int:
        return 2 if self.setting.inverted else 1

    def _rank_of(self, stage: int, number: int) -> int:
        return self.depth - 1 - stage if number % self.replicas else stage

    def _room(self, rank: int) -> float:
        """Bytes that a rank has for saved activations: its cap less what it always holds, and its largest compute."""
        if self.setting.memory_bytes is None:
            return float("inf")
        held = [self.stages.stages[s] for s in {s for s, _ in self.holds[rank]}]
        always = sum(s.parameter_bytes + s.gradient_bytes + s.state_bytes for s in held)
        return self.setting.memory_bytes[rank] - always - max(s.workspace_bytes for s in held)

    def run(self) -> list[list[Compute]] | None:
        touched, sequence, now = set(range(self.depth)), 0, 0.0
        while True:
            for rank in sorted(touched):
                if not self.busy[rank] and (compute := self.pick(rank)) is not None:
                    for event in self.begin(rank, compute, now):
                        sequence += 1
                        heapq.heappush(self.events, (event[0], sequence, *event[1:]))
            if not self.events:
                break
            now, touched = self.events[0][0], set()
            while self.events and self.events[0][0] == now:
                _, _, rank, ended, arrived = heapq.heappop(self.events)
                touched.add(rank)
                if ended is not None:
                    self.busy[rank] = False
                    if isinstance(ended, Backward):
                        self.free[rank] += self.stages.stages[ended.stage].saved_bytes
                        self.under_way[ended.micro_batch] -= 1
                        if not self.under_way[ended.micro_batch]:
                            del self.under_way[ended.micro_batch]
                            touched.update(range(self.depth))
                if arrived is not None:
                    self.missing[arrived] -= 1
        done = sum(map(len, self.orders)) == 2 * self.depth * self.count
        return self.orders if done else None

    def pick(self, rank: int) -> Compute | None:
        """The most preferred compute that could begin on a rank."""
        best: tuple[tuple[float, ...], Compute] | None = None
        for stage, replica in self.holds[rank]:
            kinds: tuple[type[Compute], ...] = (Forward, Backward)
            for kind in kinds:
                position = self.next[kind, stage, replica]
                if position == len(self.numbers[replica]):
                    continue
                number = self.numbers[replica][position]
                if self.missing[kind, stage, number] or (kind is Forward and not self.fits(rank, stage, number)):
                    continue
                remaining_s = self.ways_s[kind][stage]
                preference = self.rule(kind is Backward, remaining_s, number, self.busiest_s)
                if best is None or preference > best[0]:
                    best = (preference, kind(stage, number, replica))
        return None if best is None else best[1]

    def fits(self, rank: int, stage: int, number: int) -> bool:
        if number not in self.under_way and len(self.under_way) >= self.setting.window:
            return False
        passing = sum(edge.bytes for edge in (*self.incoming[stage], *self.outgoing[stage]))
        return self.stages.stages[stage].saved_bytes + passing <= self.free[rank]

    def begin(self, rank: int, compute: Compute, now: float) -> list[SchedulerEvent]:
        """Begin a compute; returns the events that follow: its end, and the arrival of what it makes."""
        stage, number = compute.stage, compute.micro_batch
        costs, kind = self.stages.stages[stage], type(compute)
        self.next[kind, stage, compute.replica] += 1
        self.busy[rank] = True
        self.orders[rank].append(compute)
        uses: list[tuple[type[Compute], int, int]]
        if kind is Forward:
            self.under_way.setdefault(number, self.depth)
            self.free[rank] -= costs.saved_bytes
            end = now + costs.forward_s
            uses = [(Forward, user, edge.bytes) for edge in self.outgoing[stage] for user in edge.targets]
            uses.append((Backward, stage, 0))
        else:
            end = now + costs.backward_s
            uses = [(Backward, edge.source, edge.bytes) for edge in self.incoming[stage] if edge.has_gradient]
        events: list[SchedulerEvent] = [(end, rank, compute, None)]
        for wanted, user, nbytes in uses:
            there = self._rank_of(user, number)
            per_byte, latency_s = self.links.between(rank, there) if there != rank else (0.0, 0.0)
            events.append((end + nbytes * per_byte + latency_s, there, None, (wanted, user, number)))
        return events


def _remaining_times(stages: Stages) -> dict[type[Compute], Sequence[float]]:
    """The longest time from each forward and backward to the end of its micro-batch, itself included."""
    depth, outgoing, incoming = len(stages), stages.outgoing(), stages.incoming()
    backward, forward = [0.0] * depth, [0.0] * depth
    for s in range(depth):
        earlier = (backward[edge.source] for edge in incoming[s] if edge.has_gradient)
        backward[s] = stages.stages[s].backward_s + max(earlier, default=0.0)
    for s in reversed(range(depth)):
        later = (forward[user] for edge in outgoing[s] for user in edge.targets)
        forward[s] = stages.stages[s].forward_s + max(backward[s], *later, 0.0)
    return {Forward: forward, Backward: backward}
