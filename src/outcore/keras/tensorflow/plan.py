"""Which segments of a Keras model to run again, so that a step on TensorFlow fits a budget.

The unit of choice on torch is a saved value; on TensorFlow it is a segment of calls, because a custom gradient takes a
function. So the search is over segments:

1. For some sizes, the list of calls is cut greedily so that what gradients need inside a segment is at most that size,
   at the place where the fewest bytes cross (Chen et al., 2016).
2. Of each such cut, segments are recomputed one after the other, the most bytes freed for the least work first, until
   the estimate fits: what stays over the turn from forward to backward, and what each segment holds while it is run
   again.
3. The cheapest is traced, and its peak read off TensorFlow's graph of it (`graph_memory`). If that is above the budget,
   the estimate was too low by so much, and the next is tried with this known.
4. One that fits is run on zeros, as ``fit`` runs it (`trial`), which counts scratch memory and the order of threads. A
   peak above what is allowed is taken as one that was read off too low.

What no plan can lower is refused with the smallest peak that was found, which was run, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from outcore.keras.tensorflow.calls import Calls
from outcore.keras.tensorflow.segments import Segment
from outcore.keras.tensorflow.traced import StepFacts

__all__ = ["Choice", "choose"]

_SIZES = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Into how many segments, about, the saved bytes are cut."""
_TRIES = 9
_LAST = 2
"""Of the tries, those that recompute all they can, where nothing else has fitted."""
_MARGIN = 0.92
"""Of the budget, what a prediction may take: threads run in an order that nobody knows before. Beside other work a
ResNet-50 was seen to take 7.7 % more than predicted."""
_AGAIN = 1.1
"""What a trial may take, over what the one before took."""


@dataclass(frozen=True)
class Choice:
    """Segments, the share of the forward's work that is done again, and the predicted peak."""

    segments: tuple[Segment, ...]
    work: float
    peak_bytes: int

    @property
    def budget_bytes(self) -> int:
        """A budget that allows it, if it is tried again."""
        return math.ceil(_AGAIN * self.peak_bytes / _MARGIN)


class _Estimate:
    """What segments hold, from the facts of the plain step."""

    def __init__(self, calls: Calls, facts: StepFacts) -> None:
        self.calls, self.facts = calls, facts
        self.last = calls.last_uses()
        self.saved_bytes = [sum(call.saved.values()) for call in facts.calls]
        self.total_work = sum(call.work for call in facts.calls) or 1.0
        self.saved_by_anyone = {ref for call in facts.calls for ref in call.saved}

    def crossing(self, place: int) -> int:
        """Bytes of the values made before a place and used after it."""
        made = {self.facts.buffer.get(n) for call in self.calls.calls[:place] for n in call.outputs
                if self.last[n] >= place}  # fmt: skip
        return sum(self.facts.bytes.get(ref, 0) for ref in made)

    def inputs(self, segment: Segment) -> set[object]:
        """The buffers of the values that a segment takes."""
        part = self.calls.calls[segment.start : segment.stop]
        made = {n for call in part for n in call.outputs}
        given = {n for call in part for n in call.inputs} - made - set(self.calls.inputs)
        return {self.facts.buffer[n] for n in given if n in self.facts.buffer}

    def internals(self, segment: Segment) -> set[object]:
        """The buffers that gradients inside a segment read and the segment makes."""
        return {ref for call in self.facts.calls[segment.start : segment.stop] for ref in call.saved}

    def peak(self, segments: tuple[Segment, ...]) -> int:
        """The most that is held at any segment's forward or backward."""
        size, kept, most = self.facts.bytes, set[object](), 0
        for place, segment in enumerate(segments):
            largest = max(call.largest_bytes for call in self.facts.calls[segment.start : segment.stop])
            inside = self.internals(segment)
            if segment.recompute:
                kept |= self.inputs(segment)
                outputs = {
                    self.facts.buffer.get(n)
                    for call in self.calls.calls[segment.start : segment.stop]
                    for n in call.outputs
                    if self.last[n] >= segment.stop
                }
                later = segments[place + 1] if place + 1 < len(segments) else None
                if later is not None and not later.recompute:
                    kept |= outputs & self.saved_by_anyone
            else:
                kept |= inside
            now = sum(size.get(ref, 0) for ref in kept | inside)
            most = max(most, now + 2 * largest)
        return most


def _cuts(estimate: _Estimate, limit_bytes: float) -> list[int]:
    """Places to cut so that segments save at most so much, each where little crosses."""
    saved, places, start, n = estimate.saved_bytes, [0], 0, len(estimate.saved_bytes)
    while start < n:
        held, stop = 0, start
        while stop < n and (held + saved[stop] <= limit_bytes or stop == start):
            held += saved[stop]
            stop += 1
        if stop < n:
            least = start + max(1, (stop - start) // 2)
            stop = min(range(least, stop + 1), key=lambda place: (estimate.crossing(place), -place))
        places.append(stop)
        start = stop
    return places


def _candidates(estimate: _Estimate, budget_bytes: float) -> Iterator[tuple[float, int, tuple[Segment, ...]]]:
    """Work, estimated peak and segments, for every size of segments: what fits, or the smallest."""
    facts, total = estimate.facts, sum(estimate.saved_bytes)
    for number in _SIZES:
        places = _cuts(estimate, total / number)
        segments = tuple(Segment(a, b) for a, b in itertools.pairwise(places))
        work, done = 0.0, set[int]()
        peak = estimate.peak(segments)
        while peak > budget_bytes:
            best = None
            for place, segment in enumerate(segments):
                if place in done or not all(call.pure for call in facts.calls[segment.start : segment.stop]):
                    continue
                size = sum(facts.bytes.get(ref, 0) for ref in estimate.internals(segment) - estimate.inputs(segment))
                cost = sum(call.work for call in facts.calls[segment.start : segment.stop])
                score = size / (cost + 1e-9 * estimate.total_work)
                if best is None or score > best[0]:
                    best = score, place, cost
            if best is None:
                break
            done.add(best[1])
            segments = tuple(
                Segment(s.start, s.stop, s.recompute or place == best[1]) for place, s in enumerate(segments)
            )
            work += best[2]
            peak = estimate.peak(segments)
        yield work / estimate.total_work, peak, segments


def _ordered(facts: StepFacts, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The same, with kept segments behind recomputed ones differentiated one after the other."""
    first = next((s.start for s in segments if s.recompute), None)
    return tuple(
        replace(s, ordered=all(call.pure for call in facts.calls[s.start : s.stop]))
        if first is not None and s.start > first and not s.recompute
        else s
        for s in segments
    )


def choose(
    calls: Calls,
    facts: StepFacts,
    plain_bytes: int,
    budget_bytes: int | None,
    standing_bytes: int,
    traced_peak: Callable[[tuple[Segment, ...], float], int],
    run_peak: Callable[[tuple[Segment, ...]], int | None],
) -> tuple[Choice | None, Choice]:
    """The cheapest segments that fit, or none; and those with the smallest peak that was found.

    Args:
        calls: of the model.
        facts: of its plain step.
        plain_bytes: its peak, from its graph.
        budget_bytes: none for whatever it takes.
        standing_bytes: what is there throughout: variables, inputs, targets.
        traced_peak: the peak of a step by segments, from its graph; a limit, above which it need not be known well.
        run_peak: the same, from running it; none where it is not known.
    """
    whole = (Segment(0, len(calls.calls)),)
    plain = Choice(whole, 0.0, plain_bytes)
    if budget_bytes is None:
        return plain, plain
    allowed_bytes = int(_MARGIN * budget_bytes)
    seen: dict[tuple[Segment, ...], Choice] = {}
    if plain.peak_bytes <= allowed_bytes:
        plain = seen[whole] = _run(plain, run_peak)
        if plain.peak_bytes <= allowed_bytes:
            return plain, plain
    estimate = _Estimate(calls, facts)
    aim, smallest = float(allowed_bytes - standing_bytes), plain
    tried = set[tuple[Segment, ...]]()
    for number in range(_TRIES if aim > 0 else _LAST):  # nothing fits where not even what stands throughout does
        if number >= _TRIES - _LAST:
            aim = 0.0
        found = sorted(_candidates(estimate, aim), key=lambda c: (c[1] > aim, c[0] if c[1] <= aim else c[1]))
        fresh = [c for c in found if c[2] not in tried]
        if not fresh:
            break
        work, guess, plain_segments = fresh[0]
        tried.add(plain_segments)
        segments = _ordered(facts, plain_segments)
        made = Choice(segments, work, traced_peak(segments, allowed_bytes))
        fits = made.peak_bytes <= allowed_bytes
        if fits:
            made = seen[segments] = _run(made, run_peak)
        if made.peak_bytes < smallest.peak_bytes:
            smallest = made
        if made.peak_bytes <= allowed_bytes:
            return made, smallest
        least = 0.8 if fits else 0.95  # what is not in the graph hardly falls with the estimate
        room = (allowed_bytes - standing_bytes) / (made.peak_bytes - standing_bytes)
        aim = min(aim, guess) * max(0.5, min(least, room))
    if smallest.segments in seen:
        return None, smallest
    return None, _run(replace(smallest, peak_bytes=traced_peak(smallest.segments, math.inf)), run_peak)


def _run(choice: Choice, run_peak: Callable[[tuple[Segment, ...]], int | None]) -> Choice:
    """A choice with the peak that it was seen to have, where that is above the one that was read off."""
    return replace(choice, peak_bytes=max(choice.peak_bytes, run_peak(choice.segments) or 0))
