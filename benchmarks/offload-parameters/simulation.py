"""In which order should parameters leave? AlexNet's step played through, with a computing stream and two copy engines.

    python benchmarks/offload-parameters/simulation.py

Times are those of a trace (results/2026-11-16-h200-halves-alexnet.trace.json.gz): kernels by layer, 50.5 GB/s
each way while both are busy, 8 us more for every copy. An engine goes on with the graph it is in as long as that has
something to copy, else it takes what was ready first; traces show that, and it gives the time that was measured for the
first order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

MB_PER_MS, COPY_MS = 50.5, 0.008
CONVOLUTIONS, FIRST, SECOND = 9.88, 151.0, 67.2
"""Megabytes: the buckets of the network."""
HOST_MS = 4.2
"""Spread over a step as its kernels are."""


@dataclass(eq=False)
class Task:
    """Something that an engine does."""

    name: str
    engine: str
    time_ms: float
    after: list[Task]
    issued_ms: float
    graph: int = -1
    start_ms: float = 0.0
    followers: list[Task] = field(default_factory=list)
    waits: int = 0


class Machine:
    """Engines, each of which does one thing at a time."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.graphs = 0

    def add(
        self, name: str, engine: str, time_ms: float, after: Sequence[Task | None], issued_ms: float, graph: int = -1
    ) -> Task:
        before = [task for task in after if task is not None]
        self.tasks.append(task := Task(name, engine, time_ms, before, issued_ms, graph, waits=len(before)))
        for other in before:
            other.followers.append(task)
        return task

    def trip(self, name: str, pieces: Sequence[float], after: Sequence[Task | None], issued_ms: float) -> list[Task]:
        """Pieces go out one after the other, and each comes back; gives the arrivals."""
        self.graphs += 1
        out: Task | None = None
        back: list[Task] = []
        for size in pieces:
            time_ms = size / MB_PER_MS + COPY_MS
            out = self.add(name, "out", time_ms, [out] if out else after, issued_ms, self.graphs)
            back.append(self.add(name, "in", time_ms, [out, *back[-1:]], issued_ms, self.graphs))
        return back

    def run(self) -> None:
        ready: dict[str, list[tuple[float, int, Task]]] = {"compute": [], "out": [], "in": []}
        busy: dict[str, Task | None] = dict.fromkeys(ready)
        last: dict[str, int] = dict.fromkeys(ready, -1)
        place = {id(task): i for i, task in enumerate(self.tasks)}
        events = [(task.issued_ms, 1, place[id(task)], task) for task in self.tasks if not task.waits]
        heapq.heapify(events)
        while events:
            now, kind, _, task = heapq.heappop(events)
            if kind == 0:
                busy[task.engine] = None
                for other in task.followers:
                    other.waits -= 1
                    if not other.waits:
                        heapq.heappush(events, (max(now, other.issued_ms), 1, place[id(other)], other))
            else:
                ready[task.engine].append((now, place[id(task)], task))
            if events and events[0][0] <= now:
                continue  # all that happens at the same time, before anybody chooses
            for engine, waiting in ready.items():
                if busy[engine] is None and waiting:
                    chosen = min(waiting, key=lambda row: (row[2].graph != last[engine], row[0], row[1]))
                    waiting.remove(chosen)
                    task = busy[engine] = chosen[2]
                    last[engine], task.start_ms = task.graph if task.graph >= 0 else -2, now
                    heapq.heappush(events, (now + task.time_ms, 0, place[id(task)], task))


def pieces(size: float, most: float) -> list[float]:
    count = max(2, -int(-size // most))
    return [size / count] * count


def step_ms(order: str, piece: float = 16.8, beside: float = 12.6, at_once: float = 0.55, steps: int = 16) -> float:
    """Milliseconds of a step, when steps follow each other.

    Args:
        order: "first" (every bucket when it was updated), "halves" (second halves after the convolutions) or "trips"
        (the
            convolutions between forward and backward).
        piece: megabytes of a copy.
        beside: megabytes of the first linear layer that leave with the convolutions.
        at_once: share of the second linear layer that leaves before the first one.
    """
    machine, host, begins = Machine(), 0.0, []
    now: Task | None = None
    small = first = second = part = None

    def compute(name: str, time_ms: float, *after: Task | None) -> Task:
        nonlocal now, host
        host += time_ms * HOST_MS / 3.33
        now = machine.add(name, "compute", time_ms, [now, *after], host)
        return now

    trips = order == "trips"
    for _ in range(steps):
        begins.append(compute("convolutions", 0.696, None if trips else small))
        compute("first", 0.223, first)
        if trips:
            issued = host
        arrived = second
        compute("second", 0.105, arrived)
        if trips:  # after what is computed so far: the first layer was used, the second has arrived
            used = machine.tasks[-2]
            back = machine.trip("turn", [*pieces(beside, 6.3), *pieces(CONVOLUTIONS, 6.3)], [used, arrived], issued)
            part, small = back[len(pieces(beside, 6.3)) - 1], back[-1]
        compute("loss", 0.05)
        compute("second, backward", 0.12)
        updated = compute("second, update", 0.145)
        parts = pieces(SECOND, piece)
        count = len(parts) if order == "first" else round(at_once * len(parts) + 0.49)
        second = machine.trip("second", parts[:count], [updated], host)[-1]
        compute("first, backward", 0.24, part)
        updated = compute("first, update", 0.33)
        if trips:
            whole = pieces(FIRST - beside, piece)
            back = machine.trip("first", [*whole, *parts[count:]], [updated], host)
            first, second = back[len(whole) - 1], back[-1]
        else:
            whole = pieces(FIRST, piece)
            half = len(whole) if order == "first" else round(at_once * len(whole) + 0.49)
            first = machine.trip("first", whole[:half], [updated], host)[-1]
        compute("convolutions, backward", 1.37, small if trips else None)
        updated = compute("convolutions, update", 0.055)
        if not trips:
            back = machine.trip("convolutions", pieces(CONVOLUTIONS, 6.3), [updated], host)
            small, left = back[-1], back[-1].after[0]
            if order == "halves":
                first = machine.trip("first", whole[half:], [left], host)[-1]
                second = machine.trip("second", parts[count:], [left], host)[-1]
    machine.run()
    return (begins[-1].start_ms - begins[6].start_ms) / (len(begins) - 7)


def main() -> None:
    print(f"first, pieces of 12 MiB  {step_ms('first', 12.6):.2f} ms")
    print(f"halves, pieces of 6 MiB  {step_ms('halves', 6.3):.2f} ms")
    for beside in (0.5, 6.3, 12.6, 18.9, 25.2):
        row = "  ".join(f"{step_ms('trips', size, beside):.2f}" for size in (6.3, 8.4, 10.5, 12.6, 16.8))
        print(f"trips, {beside:4.1f} MB beside, pieces of 6, 8, 10, 12, 16 MiB: {row} ms")
    print("trips, at once 0.4 to 0.8:", *(f"{step_ms('trips', at_once=x / 10):.2f}" for x in range(4, 9)))


if __name__ == "__main__":
    main()
