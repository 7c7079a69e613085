"""Linear orders of units: every one that respects the data flow gives other places to cut.

The recorded order interleaves parallel branches as the program text happened to write them. Finishing one branch before
the next begins, or doing what is needed late as late as possible, moves whole branches to the other side of a cut and
shortens the life of what crosses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outcore.planner.partition.weighted_units import WeightedUnits


def linear_orders(pieces: WeightedUnits) -> list[tuple[int, ...]]:
    """The recorded order, and others where branches allow them; each once."""
    n = len(pieces)
    before, after = [set(b) for b in pieces.units.before], pieces.after
    longest = [0.0] * n
    for i in reversed(range(n)):
        longest[i] = pieces.time_s[i] + max((longest[j] for j in after[i]), default=0.0)
    size = [0.0] * n
    for flow in pieces.flows:
        size[flow.producer] += flow.bytes
    orders = [tuple(range(n))]
    if is_row(pieces):
        return orders
    # Deepest first: what was made last is used next, so a branch is finished before another begins.
    orders.append(_schedule(before, after, lambda i, age: (-age, i)))
    orders.append(_schedule(before, after, lambda i, age: (-longest[i], i)))
    orders.append(_schedule(before, after, lambda i, age: (longest[i], i)))
    orders.append(_schedule(before, after, lambda i, age: (size[i], i)))
    # The same seen from the end: everything as late as possible.
    reverse = _schedule(after, before, lambda i, age: (-age, -i))
    orders.append(reverse[::-1])
    return list(dict.fromkeys(orders))


def is_row(pieces: WeightedUnits) -> bool:
    """Whether the recorded order is the only one: every unit needs the one before it."""
    return all(i in sources for i, sources in enumerate(pieces.units.before[1:]))


def coarse_places(pieces: WeightedUnits, order: Sequence[int], most: int) -> list[int] | None:
    """At most so many places to cut at, spread evenly over the time, each where little crosses; None for all."""
    n = len(order)
    if n <= most:
        return None
    where = {unit: position for position, unit in enumerate(order)}
    crossing = [0.0] * (n + 1)
    for flow in pieces.flows:
        begin = where[flow.producer]
        end = max((where[u] for u in flow.users), default=n - 1 if flow.to_loss else begin)
        crossing[begin + 1] += flow.bytes
        crossing[end + 1 if end < n else n] -= flow.bytes
    for i in range(1, n + 1):
        crossing[i] += crossing[i - 1]
    total = sum(pieces.time_s)
    # Half of each place's share is time and half is count, so that cheap stretches keep some places too.
    best: dict[int, int] = {}
    passed = 0.0
    for position in range(1, n):
        passed += pieces.time_s[order[position - 1]]
        share = (passed / total if total else 0.0) + position / n
        window = int(share / 2 * (most - 1))
        if window not in best or crossing[position] < crossing[best[window]]:
            best[window] = position
    return sorted(best.values())


def _schedule(
    before: Sequence[set[int] | frozenset[int]], after: Sequence[set[int]], key: Callable[[int, int], tuple[float, int]]
) -> tuple[int, ...]:
    """A topological order that takes the ready unit with the smallest key; `age` is when it became ready."""
    waiting = [len(b) for b in before]
    ready = {i: 0 for i, count in enumerate(waiting) if count == 0}
    order: list[int] = []
    while ready:
        unit = min(ready, key=lambda i: key(i, ready[i]))
        del ready[unit]
        order.append(unit)
        for target in after[unit]:
            waiting[target] -= 1
            if waiting[target] == 0:
                ready[target] = len(order)
    return tuple(order)
