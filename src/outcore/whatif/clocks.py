"""The time of a step from its tasks: every resource has a clock, and takes one task at a time.

A task begins when its resource is free and all it waits for has ended. A resource takes its tasks in the order of the
step, as a CUDA stream does, or, rescheduled, whichever of the ready ones comes first by its priority, as a network card
with queues does. Nothing is random: of two tasks that could begin at the same time the one that stands first does.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from outcore.errors import WhatIfError
from outcore.whatif.recorded_step import RecordedStep, Task

__all__ = ["SimulatedStep", "simulate_tasks"]


@dataclass(frozen=True)
class SimulatedStep:
    """When every task of a step ran."""

    step: RecordedStep
    spans: dict[str, tuple[float, float]]
    """Beginning and end of each task, in seconds."""

    @cached_property
    def step_s(self) -> float:
        """When the last task ends."""
        return max((end for _, end in self.spans.values()), default=0.0)

    def busy_s(self, resource: str) -> float:
        """How long a resource works, in all."""
        return sum(t.time_s for t in self.step.tasks.values() if t.resource == resource)

    def exposed_s(self, resource: str, under: str = "device") -> float:
        """How long a resource works while another one does not: what is not hidden behind it."""
        own = sorted(self.spans[t.name] for t in self.step.tasks.values() if t.resource == resource and t.time_s > 0)
        other = sorted(self.spans[t.name] for t in self.step.tasks.values() if t.resource == under and t.time_s > 0)
        hidden, place = 0.0, 0
        for begin, end in own:
            while place < len(other) and other[place][1] <= begin:
                place += 1
            at = place
            while at < len(other) and other[at][0] < end:
                hidden += min(end, other[at][1]) - max(begin, other[at][0])
                at += 1
        return sum(end - begin for begin, end in own) - hidden

    @cached_property
    def critical(self) -> tuple[str, ...]:
        """The tasks of one longest chain, from the first to the last: nothing else can shorten the step alone."""
        by_end: dict[tuple[str, float], list[str]] = defaultdict(list)
        for name, (_, end) in self.spans.items():
            by_end[self.step.tasks[name].resource, end].append(name)
        at = max(self.spans, key=lambda name: self.spans[name][1], default=None)
        chain: list[str] = []
        while at is not None:
            chain.append(at)
            task, begin = self.step.tasks[at], self.spans[at][0]
            before = [n for n in task.after if self.spans[n][1] == begin]
            before += [n for n in by_end[task.resource, begin] if n != at and n not in chain]
            at = before[0] if before and begin > 0 else None
        return tuple(reversed(chain))

    def critical_s(self) -> dict[str, float]:
        """How long the critical chain is on each resource."""
        sums: dict[str, float] = defaultdict(float)
        for name in self.critical:
            task = self.step.tasks[name]
            sums[task.resource] += task.time_s
        return dict(sums)

    @property
    def bound_by(self) -> str:
        """The resource that most of the critical chain is on."""
        sums = self.critical_s()
        return max(sums, key=sums.__getitem__) if sums else ""


def simulate_tasks(step: RecordedStep) -> SimulatedStep:
    """Play a step through.

    Raises:
        WhatIfError: tasks wait for each other in a circle; names one of them.
    """
    if not step.priority:
        spans = _in_order(step)
        if spans is not None:
            return SimulatedStep(step, spans)
    return SimulatedStep(step, _by_events(step))


def _in_order(step: RecordedStep) -> dict[str, tuple[float, float]] | None:
    """One pass, where every task stands behind all it waits for; None where one does not."""
    free: dict[str, float] = defaultdict(float)
    spans: dict[str, tuple[float, float]] = {}
    for name, task in step.tasks.items():
        begin = free[task.resource]
        for needed in task.after:
            if needed not in spans:
                return None
            begin = max(begin, spans[needed][1])
        spans[name] = (begin, begin + task.time_s)
        free[task.resource] = begin + task.time_s
    return spans


def _by_events(step: RecordedStep) -> dict[str, tuple[float, float]]:
    """Events in the order of time: a task that ends makes others ready, and its resource takes the next."""
    return _Events(step).run()


class _Events:
    def __init__(self, step: RecordedStep) -> None:
        self.step = step
        self.place = {name: number for number, name in enumerate(step.tasks)}
        self.missing = {name: len(set(task.after)) for name, task in step.tasks.items()}
        self.users: dict[str, list[str]] = defaultdict(list)
        for task in step.tasks.values():
            for needed in dict.fromkeys(task.after):
                self.users[needed].append(task.name)
        self.queues: dict[str, list[str]] = defaultdict(list)
        for name, task in step.tasks.items():
            self.queues[task.resource].append(name)
        self.head = dict.fromkeys(self.queues, 0)
        self.ready: dict[str, list[tuple[float, int, str]]] = defaultdict(list)
        self.busy: set[str] = set()
        self.events: list[tuple[float, int, str]] = []
        self.spans: dict[str, tuple[float, float]] = {}

    def run(self) -> dict[str, tuple[float, float]]:
        for name, count in self.missing.items():
            if count == 0:
                self._offer(self.step.tasks[name])
        for resource in self.queues:
            self._take(resource, 0.0)
        while self.events:
            now = self.events[0][0]
            ended: list[str] = []
            while self.events and self.events[0][0] == now:  # all that end now, before anything else begins
                ended.append(heapq.heappop(self.events)[2])
            for name in ended:
                self.busy.discard(self.step.tasks[name].resource)
                for user in self.users[name]:
                    self.missing[user] -= 1
                    if self.missing[user] == 0:
                        self._offer(self.step.tasks[user])
            for resource in self.queues:
                self._take(resource, now)
        if len(self.spans) < len(self.step.tasks):
            stuck = next(name for name in self.step.tasks if name not in self.spans)
            raise WhatIfError(f"task {stuck!r} never begins: it waits for itself, by way of others or of an order")
        return self.spans

    def _offer(self, task: Task) -> None:
        order = self.step.priority.get(task.resource)
        if order is not None:
            heapq.heappush(self.ready[task.resource], (order(task), self.place[task.name], task.name))

    def _take(self, resource: str, now: float) -> None:
        if resource in self.busy:
            return
        if resource in self.step.priority:
            if not self.ready[resource]:
                return
            name = heapq.heappop(self.ready[resource])[2]
        else:
            queue, at = self.queues[resource], self.head[resource]
            if at >= len(queue) or self.missing[queue[at]]:
                return
            name, self.head[resource] = queue[at], at + 1
        end = now + self.step.tasks[name].time_s
        self.spans[name] = (now, end)
        self.busy.add(resource)
        heapq.heappush(self.events, (end, self.place[name], name))
