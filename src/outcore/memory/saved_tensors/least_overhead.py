"""How much of a budget to leave to the allocator, found by trying.

A plan counts the bytes of tensors. What is reserved for them is more, by the holes between them and by what libraries
take, and by how much more differs from plan to plan. So the least to leave free is bracketed: what was too little, what
was enough, what left no plan at all. From too little it goes up by what was missed; once something holds that costs
time over what did not, it goes back by halves.

    too little ───────▶ │ tried │ ◀─────── enough, or no plan
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_TRIES = 6
_FINE = 0.015
"""Share of the budget below which differences are not worth another try."""
_MORE = 1.2
"""Of what was missed, how much more to leave: holes do not shrink with the plan."""
_SLOWER = 1.02
"""What holds and is predicted to take more than this over what did not is worth another try."""


@dataclass(frozen=True, slots=True)
class TriedOverhead:
    """A step under a plan that leaves so many bytes free."""

    free_bytes: int
    taken_bytes: int
    """What was reserved for it."""
    time_s: float
    """Predicted by its plan."""


def least_overhead(
    attempt: Callable[[int], TriedOverhead | None],
    budget_bytes: int,
    begin_bytes: int = 0,
    tries: int = _TRIES,
    late: Callable[[], bool] = lambda: False,
) -> TriedOverhead:
    """The fastest step that was seen to stay within a budget; if none did, the one that took least.

    Args:
        attempt: plans a step that leaves so many bytes free, and takes it; none if there is no such plan. The first
            has one.
        budget_bytes: the most that may be reserved.
        begin_bytes: to leave free at first.
        tries: at most so many.
        late: whether time is up; then what holds is not made faster. Until something holds, time does not count: a busy
            machine must not get another plan.
    """
    fine = int(_FINE * budget_bytes)
    first = attempt(begin_bytes)
    assert first is not None
    seen, none, free = [first], None, begin_bytes
    for _ in range(tries - 1):
        over = [t for t in seen if t.taken_bytes > budget_bytes]
        held = [t for t in seen if t.taken_bytes <= budget_bytes]
        if not over:
            break
        low = max(over, key=lambda t: t.free_bytes)
        if held:
            best = min(held, key=lambda t: t.free_bytes)
            if late() or best.time_s <= _SLOWER * low.time_s or best.free_bytes - low.free_bytes <= fine:
                break
            free = (low.free_bytes + best.free_bytes) // 2
        else:
            free = low.free_bytes + max(int(_MORE * (low.taken_bytes - budget_bytes)), fine // 2)
            if none is not None and free >= none:
                free = (low.free_bytes + none) // 2
                if none - low.free_bytes <= fine // 2:
                    break
        if (found := attempt(free)) is not None:
            seen.append(found)
        else:
            none = free
    held = [t for t in seen if t.taken_bytes <= budget_bytes]
    return min(held, key=lambda t: t.time_s) if held else min(seen, key=lambda t: t.taken_bytes)
