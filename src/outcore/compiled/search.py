"""Which values to save: a frontier of peak against time, found by lifetimes and not by the bytes that are saved.

Torch's own choice, its minimum cut, is where the search begins: the fastest step, as a rule. From there values are
dropped that are held at the peak, the cheapest to make again for what they free first, each judged by the whole step
that results, since a dropped value lengthens the lives of others. A chain of drops ends where everything is made again
from values that are themselves dropped. So there are other beginnings: the forward in *segments*, of which only what
crosses from one to the next is saved (Chen et al. 2016, with the cuts where least crosses); and to each of them values
are added back, from the end of the network, where they are held shortest, to its beginning.

Where the device has a link to a larger memory, what is saved can leave instead of being made again: from each
beginning the values that are made first, and are away longest, leave first; and in a descent a value at the peak may
leave or be dropped, whichever costs less for what it frees.

Every step that was judged is a point. The frontier does not depend on the budget, so that a larger budget never gets a
slower step. Nothing here looks at a clock: the same graph has the same frontier.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from outcore.compiled.joint_graph import JointGraph
from outcore.compiled.lifetimes import StepOfGraph, step_of
from outcore.compiled.times.copy_times import EARLY

__all__ = ["Frontier", "search"]

_SMALL = 1 / 512
"""Values below this share of the largest are saved wherever they are of use: statistics of norms, seeds."""
_SEGMENTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48)
_TRIED = 6
"""Values tried at each step of a descent."""
_STEPS_BACK = 10
"""Parts in which values are added back."""
_EVALUATIONS = 600_000
"""Nodes times judged steps."""
_SHARES_AWAY = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Of the bytes that can leave the device."""
_TRIED_AWAY = 2
"""Values tried to leave at each step of a descent."""


@dataclass
class Frontier:
    """The steps that were judged, without those that are both slower and larger than another."""

    points: list[StepOfGraph] = field(default_factory=list)
    """From the fastest to the smallest."""
    judged: int = 0
    staying: list[StepOfGraph] = field(default_factory=list)
    """The same of those steps alone in which every value stays on the device."""

    def within(self, budget_bytes: int | None) -> StepOfGraph | None:
        """The fastest step within a budget."""
        fitting = [p for p in self.points if budget_bytes is None or p.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda p: (p.seconds, p.peak_bytes), default=None)

    def without_copies(self) -> Frontier:
        """The steps in which every value stays on the device."""
        return Frontier(self.staying or [p for p in self.points if not p.ways], self.judged)

    @property
    def least(self) -> StepOfGraph:
        """The step with the smallest peak."""
        return min(self.points, key=lambda p: (p.peak_bytes, p.seconds))


class _Search:
    def __init__(self, graph: JointGraph, loss_bytes: int) -> None:
        self.graph, self.loss_bytes = graph, loss_bytes
        self.seen: dict[tuple[frozenset[int], frozenset[int], float], StepOfGraph] = {}
        largest = max((graph.bytes[i] for i in range(len(graph.nodes)) if not graph.given[i]), default=0)
        self.small = int(_SMALL * largest)
        self.limit = max(60, _EVALUATIONS // max(1, len(graph.nodes)))

    def judge(self, saved: Iterable[int], offloaded: frozenset[int] = frozenset(), early: float = EARLY) -> StepOfGraph:
        wanted = frozenset(saved)
        key = wanted, offloaded, early if offloaded else EARLY
        if key not in self.seen:
            self.seen[key] = step_of(self.graph, wanted, offloaded=offloaded, early=key[2], loss_bytes=self.loss_bytes)
        return self.seen[key]

    @property
    def spent(self) -> bool:
        return len(self.seen) >= self.limit

    def descend(self, start: StepOfGraph, limit: int) -> None:
        """Drop what is held at the peak, one after the other."""
        graph, here = self.graph, start
        refused: set[int] = set()
        while not self.spent and limit > 0:
            limit -= 1
            size = graph.bytes
            there = self._at_peak(here)
            options = [b for b in there if b not in refused and size[b] > self.small]
            options.sort(key=lambda b: self._price(b) / size[b])
            best: tuple[float, StepOfGraph] | None = None
            for tried, b in self._steps_down(here, options[:_TRIED]):
                gained = float(here.peak_bytes - tried.peak_bytes)
                if gained <= 0:
                    if self._slack(tried, here) >= 0:
                        refused.add(b)
                    gained = 1e-3 * size[b] if b not in refused else 0
                if gained > 0:
                    worth = gained / max(1e-12, tried.seconds - here.seconds)
                    if best is None or worth > best[0]:
                        best = worth, tried
            if best is None:
                if len(options) <= _TRIED:
                    return
                refused.update(options[:_TRIED])
                continue
            here = best[1]

    def _steps_down(self, here: StepOfGraph, options: list[int]) -> Iterator[tuple[StepOfGraph, int]]:
        """Steps with less at the peak, each with the buffer that is dropped or leaves."""
        for b in options:
            yield self.judge((i for i in here.saved if self.graph.source[i] != b), here.offloaded), b
        if here.offloaded:
            for b in self.movable(here)[:_TRIED_AWAY]:
                yield self.judge(here.saved, here.offloaded | {b}), b

    def movable(self, step: StepOfGraph) -> list[int]:
        """Buffers that could leave the device and have not, by when they are made."""
        graph, link = self.graph, self.graph.rates.link
        if link is None:
            return []
        found = {graph.source[i] for i in step.saved if graph.fills[i]} - step.offloaded
        found -= {graph.source[i] for i in graph.outputs}
        least = max(link.least_bytes, self.small)
        return sorted(b for b in found if graph.bytes[b] >= least and not graph.given[b])

    def send_away(self, start: StepOfGraph) -> list[StepOfGraph]:
        """Let what was made first leave the device, in growing shares."""
        size, found = self.graph.bytes, []
        values = self.movable(start)
        total = sum(size[b] for b in values)
        sums = list(itertools.accumulate(size[b] for b in values))
        for share in _SHARES_AWAY:
            chosen = values[: bisect.bisect_right(sums, share * total)]
            if chosen:
                found += [self.judge(start.saved, frozenset(chosen), early) for early in (EARLY, 0.0)]
        return found

    def _slack(self, tried: StepOfGraph, before: StepOfGraph) -> int:
        """What a step that does not lower the peak still adds to it, or takes from what is saved."""
        return (tried.peak_bytes - before.peak_bytes) + (tried.saved_bytes - before.saved_bytes)

    def _at_peak(self, step: StepOfGraph) -> list[int]:
        """Buffers of saved values that are there at the peak, and could be made again."""
        graph = self.graph
        droppable = {graph.source[i] for i in step.saved if not graph.fixed[i]}
        droppable -= {graph.source[i] for i in step.saved if graph.fixed[i]} | {graph.source[i] for i in graph.outputs}
        moment = step.peak
        if moment.phase == "loss":
            return sorted(droppable)
        held = step.forward if moment.phase == "forward" else step.backward
        return sorted(h.source for h in held if h.source in droppable and h.first <= moment.number <= h.last)

    def _price(self, number: int) -> float:
        """Roughly what it takes to make a value again from what it was made of."""
        graph = self.graph
        moved = graph.bytes[number] + sum(graph.bytes[graph.source[a]] for a in graph.arguments[number])
        own = graph.whole[number] if graph.whole[number] >= 0 else number
        return max(graph.seconds[own], (0.2 if graph.fusible[number] else 1.0) * moved / graph.rates.bytes_per_s)

    def segments(self, fast: StepOfGraph) -> None:
        """Save what crosses between segments alone, then add back."""
        graph, size = self.graph, self.graph.bytes
        small = {i for i in fast.saved if size[graph.source[i]] <= self.small}
        bare = self.judge(small)
        held = [h for h in bare.forward if h.bytes > 0 and not graph.given[h.source]]
        if not held:
            return
        length = max(h.last for h in bare.forward) + 1
        crossing = [0] * (length + 1)
        for h in held:
            for k in range(h.first, min(h.last, length)):
                crossing[k] += h.bytes
        weight = [0.0] * length
        for h in held:
            weight[min(h.first, length - 1)] += h.bytes
        total = sum(weight)
        starts: list[StepOfGraph] = []
        for count in _SEGMENTS:
            if count > length or self.spent:
                break
            cuts = _cuts(weight, crossing, total, count)
            kept = {h.source for h in held for k in cuts if h.first <= k < h.last}
            starts.append(self.judge(small | {i for i in kept if graph.tensor[i] and not graph.is_backward[i]}))
        wanted = sorted((i for i in fast.saved if size[graph.source[i]] > self.small), key=lambda i: -i)
        starts.sort(key=lambda p: p.peak_bytes)
        for start in starts:
            if self.spent:
                return
            self.add_back(start, wanted)

    def add_back(self, start: StepOfGraph, wanted: list[int]) -> None:
        """Save more, from the end of the network and by what it saves in time."""
        size, source = self.graph.bytes, self.graph.source
        by_worth = sorted(wanted, key=lambda i: -self._price(i) / max(1, size[source[i]]))
        for order in (wanted, by_worth):
            more = [i for i in order if i not in start.saved]
            each = max(1, -(-len(more) // _STEPS_BACK))
            for k in range(each, len(more), each):
                self.judge(start.saved | set(more[:k]))


def _cuts(weight: list[float], crossing: list[int], total: float, count: int) -> list[int]:
    """Where to cut the forward into segments of about the same bytes, each where least crosses nearby."""
    cuts, done, target = [], 0.0, total / count
    bounds: list[int] = []
    for k, w in enumerate(weight):
        done += w
        if done >= target * (len(bounds) + 1) and len(bounds) < count - 1:
            bounds.append(k)
    for number, k in enumerate(bounds):
        left = (bounds[number - 1] + k) // 2 if number else k // 2
        right = (bounds[number + 1] + k) // 2 if number + 1 < len(bounds) else (len(weight) - 1 + k) // 2
        window = range(max(left, k - (k - left) // 2), min(right, k + (right - k) // 2) + 1)
        cuts.append(min(window, key=lambda p: (crossing[p], abs(p - k)), default=k))
    return cuts


def search(graph: JointGraph, *, loss_bytes: int = 0) -> Frontier:
    """The frontier of a joint graph.

    Args:
        graph: the joint graph.
        loss_bytes: what the loss holds beside.
    """
    looking = _Search(graph, loss_bytes)
    fast = looking.judge(graph.index[node] for node in graph.partition.torch_choice(1.0))
    libraries = looking.judge(
        i
        for i in range(len(graph.nodes))
        if not graph.given[i]
        and not graph.is_backward[i]
        and graph.tensor[i]
        and graph.source[i] == i
        and (not graph.fusible[i] or graph.bytes[i] <= looking.small or graph.whole[i] >= 0)
        and (i in fast.saved or not graph.fusible[i] or graph.whole[i] >= 0)
    )
    looking.segments(fast)
    looking.descend(fast, looking.limit // _TRIED)
    looking.descend(libraries, looking.limit // _TRIED)
    small = [p for p in looking.seen.values() if p.peak_bytes < fast.peak_bytes]
    for start in sorted(small, key=lambda p: p.peak_bytes)[:2]:
        looking.descend(start, 40)
    if graph.rates.link is not None:
        _with_copies(looking, fast, libraries)
    judged = list(looking.seen.values())
    return Frontier(_pareto(judged), len(judged), _pareto(p for p in judged if not p.ways))


def _with_copies(looking: _Search, *beginnings: StepOfGraph) -> None:
    """Search on, with values that leave the device: from the beginnings and from what was found without."""
    looking.limit += len(looking.seen)
    found = _pareto(looking.seen.values())
    spread = found[:: max(1, len(found) // 6)]
    for start in (*beginnings, *spread, found[-1]):
        if looking.spent:
            return
        looking.send_away(start)
    away = [p for p in _pareto(looking.seen.values()) if p.offloaded]
    for start in away[:: max(1, len(away) // 4)]:
        looking.descend(start, 40)


def _pareto(points: Iterable[StepOfGraph]) -> list[StepOfGraph]:
    """The points to which no other is better in both respects."""
    kept: list[StepOfGraph] = []
    least = None
    for point in sorted(points, key=lambda p: (p.seconds, p.peak_bytes)):
        if least is None or point.peak_bytes < least:
            kept.append(point)
            least = point.peak_bytes
    return kept
