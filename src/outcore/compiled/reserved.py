"""What the allocator reserves for a step beyond the bytes that live in it.

A budget bounds reserved memory. Between living buffers there are holes that fit nothing else, segments grow by 20 MiB
at a time, and a limit that a process has set for itself is compared with what is reserved *and* the whole next request
(`outcore.allocator.process_limit`). How much all that is follows from the order in which buffers come and go, and the
lifetimes of a step tell that order: three steps are played against the allocator's own rules
(`outcore.allocator.caching_allocator`), since what stays from the first lies in the way of the second.

    step 1   forward ─▶ loss ─▶ backward ─▶ optimizer's state comes, and stays
    step 2   the last gradients go, forward ─▶ …

What libraries take inside of an operation is not known here; steps that are tried before training show it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from outcore.allocator.caching_allocator import Event, ExpandableSegment, is_small, rounded
from outcore.allocator.process_limit import limit_for
from outcore.compiled.lifetimes import Held, StepOfGraph

__all__ = ["Allocator", "choose_reserved", "step_events"]

_STEPS = 3
_TRIES = 8
_FINE = 2**20

Chosen = TypeVar("Chosen")


@dataclass(frozen=True)
class Allocator:
    """What else is there in a step that the allocator has to find room for."""

    workspace_bytes: tuple[int, ...] = ()
    """Of libraries, one for each thread: they come when it begins, and stay."""
    state_bytes: tuple[int, ...] = ()
    """Tensors of the optimizer, which come after the first backward, and stay."""
    loss_bytes: int = 0
    limited: bool = False
    """Whether the process has a limit of its own."""

    def overhead(self, points: Sequence[StepOfGraph]) -> int:
        """Bytes that are reserved, or that a limit would have to have, beyond those that live at the peak.

        Args:
            points: the pieces of a step as chosen, in their order.
        """
        segments = {small: ExpandableSegment(small=small) for small in (True, False)}
        places: dict[int, tuple[ExpandableSegment, int]] = {}
        history: list[dict[str, Any]] = []
        reserved = living = most = 0
        for name, size in step_events(points, self):
            if not size:
                segment, taken = places.pop(name)
                segment.give(name)
                living -= taken
                continue
            segment, taken = segments[is_small(size)], rounded(size)
            places[name] = segment, taken
            segment.take(name, taken)
            living += taken
            most = max(most, living)
            if (now := sum(s.size for s in segments.values())) > reserved:
                if self.limited:
                    history += ({"action": "segment_map", "size": now - reserved}, {"action": "alloc", "size": taken})
                reserved = now
        return (limit_for(history, 0) if self.limited else reserved) - most


def step_events(points: Sequence[StepOfGraph], beside: Allocator) -> Iterator[Event]:
    """Tensors as they come and go in the first steps of training, each with a number; those that go with no bytes.

    Args:
        points: the pieces of a step, in their order.
        beside: what else comes.
    """
    numbers = itertools.count()
    gradients: list[int] = []
    for step in range(_STEPS):
        for name in gradients:
            yield name, 0
        gradients = []
        if step == 0:
            yield from ((next(numbers), size) for size in beside.workspace_bytes[:1] if size)
        saved: list[dict[int, int]] = []
        for point in points:
            names: dict[int, int] = {}
            saved.append(names)
            yield from _played(point.forward, names, numbers)
        if step == 0:
            yield from ((next(numbers), size) for size in beside.workspace_bytes[1:] if size)
        loss = next(numbers)
        if beside.loss_bytes:
            yield loss, beside.loss_bytes
        for place, (point, names) in enumerate(zip(reversed(points), reversed(saved), strict=True)):
            given = {held.source: held for held in point.backward if held.first < 0}
            for source in [s for s in names if s not in given]:
                yield names.pop(source), 0
            for source, held in given.items():
                if source not in names and held.bytes:
                    names[source] = next(numbers)
                    yield names[source], held.bytes
            if place == 0 and beside.loss_bytes:
                yield loss, 0
            yield from _played(point.backward, names, numbers)
            for source, name in names.items():
                if source in given:
                    yield name, 0
                else:
                    gradients.append(name)
        if step == 0:
            yield from ((next(numbers), size) for size in beside.state_bytes if size)
    for name in gradients:
        yield name, 0


def _played(held: Sequence[Held], names: dict[int, int], numbers: Iterator[int]) -> Iterator[Event]:
    """The kernels of one graph; `names` has the number of every buffer that is there, before and after.

    Args:
        held: its buffers; what is there from before has a number already, or gets one now.
        names: numbers by buffer.
        numbers: for new ones.
    """
    end = max((h.last for h in held), default=0)
    coming: dict[int, list[Held]] = {}
    going: dict[int, list[int]] = {}
    over = {h.over for h in held if h.over >= 0}
    for h in held:
        if h.bytes and h.source not in names:
            coming.setdefault(h.first, []).append(h)
        if h.bytes and h.last < end and h.source not in over:
            going.setdefault(h.last, []).append(h.source)
    for kernel in sorted({*coming, *going}):
        for h in coming.get(kernel, ()):
            if h.over >= 0 and h.over in names:
                names[h.source] = names.pop(h.over)
            else:
                names[h.source] = next(numbers)
                yield names[h.source], h.bytes
        for source in going.get(kernel, ()):
            if source in names:
                yield names.pop(source), 0


def choose_reserved(
    choose: Callable[[int], Chosen | None],
    peak: Callable[[Chosen], int],
    overhead: Callable[[Chosen], int],
    budget_bytes: int,
) -> Chosen | None:
    """The choice that is within a budget with what the allocator reserves beyond its peak; if there seems to be none,
    the one that misses it least, since steps are tried; none if nothing is within the budget.

    Args:
        choose: the fastest whose peak is within so many bytes.
        peak: its living bytes.
        overhead: what is reserved beyond them.
        budget_bytes: for both.
    """
    room, nearest = budget_bytes, None
    for _ in range(_TRIES):
        chosen = choose(room)
        if chosen is None:
            break
        over = peak(chosen) + overhead(chosen) - budget_bytes
        if over <= 0:
            return chosen
        if nearest is None or over < nearest[0]:
            nearest = over, chosen
        room = min(room, peak(chosen)) - max(_FINE, over // 2)
    return nearest[1] if nearest is not None else None
