"""The smallest parts that may be put on different ranks.

The user says how fine: the model's own children ("block"), modules down to a depth, or single calls ("layer"). Then
what must stay together is joined: calls that write memory and calls that read it afterwards; calls that share a
parameter (unless copies of it are to be kept equal); calls of a module that keeps statistics; calls that do nothing,
like a view, and the call that makes their input, so that no rank is ever without work. Joining can close a cycle (A
before B before A), and a cycle cannot be cut, so the strongly connected components of what results are the *units*.
They form a directed acyclic graph, numbered in the order of execution.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.graph.queries import reads_after_writes
from outcore.planner.pipeline.call_weights import CallWeights

Granularity = Literal["block", "layer"] | int
"""How fine the parts are: the model's own children, single calls, or modules down to a depth."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Calls that stay on one rank."""

    name: str
    """Name of the first block or call in it."""
    parts: tuple[str, ...]
    """The blocks (as calls of them) or calls it consists of, at the chosen granularity."""
    calls: tuple[str, ...]


@dataclass(frozen=True)
class Units:
    """The units of a graph, in order of execution."""

    units: tuple[Unit, ...]
    before: tuple[frozenset[int], ...]
    """For every unit, those that must run before it (direct predecessors)."""

    def __len__(self) -> int:
        return len(self.units)

    @property
    def of_call(self) -> dict[str, int]:
        """The unit of every call."""
        return {call: i for i, unit in enumerate(self.units) for call in unit.calls}


def find_units(
    graph: Graph,
    weights: CallWeights,
    granularity: Granularity = "layer",
    tied: Literal["together", "copies"] = "together",
) -> Units:
    """The units of a graph.

    Args:
        graph: the network.
        weights: tell which parameters are trained, and which are tied.
        granularity: "block", "layer" or a depth.
        tied: whether calls that share a trained parameter stay together, or may be apart with a copy of it on each
            rank, whose gradients are then to be added up.
    """
    if isinstance(granularity, int) and granularity < 1:
        raise PlanError(f"granularity {granularity} is too coarse: 1 is the model's own children, 2 theirs")
    depth = None if granularity == "layer" else 1 if granularity == "block" else granularity
    boxes = list(graph.view(depth).boxes.values())
    part = {call: i for i, box in enumerate(boxes) for call in box.calls}
    join = _Join(len(boxes))
    for calls in _inseparable(graph, weights, tied):
        first, *rest = (part[call] for call in calls)
        for other in rest:
            join.union(first, other)
    arcs: dict[int, set[int]] = {}
    for name, call in graph.calls.items():
        earlier = [p for v in call.inputs if (p := graph.values[v].producer) is not None]
        for source in (*earlier, *(c for c in call.after if c in part)):
            a, b = join.find(part[source]), join.find(part[name])
            if a != b:
                arcs.setdefault(a, set()).add(b)
    component = _components(sorted({join.find(i) for i in range(len(boxes))}), arcs)
    members: dict[int, list[int]] = {}
    for i in range(len(boxes)):
        members.setdefault(component[join.find(i)], []).append(i)
    time = {call: i for i, call in enumerate(graph.calls)}
    begin = {c: min(time[call] for i in parts for call in boxes[i].calls) for c, parts in members.items()}
    before: dict[int, set[int]] = {c: set() for c in members}
    for a, targets in arcs.items():
        for b in targets:
            if component[a] != component[b]:
                before[component[b]].add(component[a])
    order = _topological(before, begin)
    number = {c: i for i, c in enumerate(order)}
    units = []
    for c in order:
        inside = sorted((call for i in members[c] for call in boxes[i].calls), key=time.__getitem__)
        names = tuple(boxes[i].name for i in members[c])
        units.append(Unit(names[0], names, tuple(inside)))
    return Units(tuple(units), tuple(frozenset(number[p] for p in before[c]) for c in order))


def _inseparable(graph: Graph, weights: CallWeights, tied: str) -> Iterable[tuple[str, ...]]:
    """Groups of calls that must be on one rank."""
    if tied == "together":
        yield from weights.tied.values()
    readers: dict[str, list[str]] = {}
    for name, call in graph.calls.items():
        for parameter in call.parameters:
            if parameter.rpartition(".")[2] in ("running_mean", "running_var"):
                readers.setdefault(parameter, []).append(name)
    yield from (tuple(calls) for calls in readers.values())
    yield from _idle(graph, weights)
    yield from ((writer, reader) for writer, _, reader in reads_after_writes(graph))


def _idle(graph: Graph, weights: CallWeights) -> Iterable[tuple[str, str]]:
    """Calls that take no time, each with the call before it, or the first one after it where nothing is before."""
    if not any(weight.time_s for weight in weights.calls.values()):
        return
    for name, call in graph.calls.items():
        if weights.calls[name].time_s or weights.calls[name].saved:
            continue
        before = [p for v in call.inputs if (p := graph.values[v].producer) is not None]
        after = [c for v in call.outputs for c in graph.values[v].consumers]
        if other := (before[-1:] or after[:1]):
            yield name, other[0]


class _Join:
    """Union-find over calls: which of them must stay together."""

    def __init__(self, size: int) -> None:
        self.parent = list(range(size))

    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def union(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        self.parent[max(a, b)] = min(a, b)


def _components(nodes: list[int], arcs: Mapping[int, set[int]]) -> dict[int, int]:
    """Strongly connected components (Tarjan 1972, without recursion): node -> representative."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found: dict[int, int] = {}
    for root in nodes:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        work = [(root, iter(sorted(arcs.get(root, ()))))]
        while work:
            node, rest = work[-1]
            for target in rest:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    work.append((target, iter(sorted(arcs.get(target, ())))))
                    break
                if target not in found:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    while True:
                        member = stack.pop()
                        found[member] = node
                        if member == node:
                            break
    return found


def _topological(before: Mapping[int, set[int]], begin: Mapping[int, int]) -> list[int]:
    """The order of execution, as far as dependencies allow."""
    waiting = {node: len(sources) for node, sources in before.items()}
    after: dict[int, list[int]] = {node: [] for node in before}
    for node, sources in before.items():
        for source in sources:
            after[source].append(node)
    ready = [(begin[node], node) for node, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for target in after[node]:
            waiting[target] -= 1
            if waiting[target] == 0:
                heapq.heappush(ready, (begin[target], target))
    return order
