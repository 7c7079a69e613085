"""Time against memory: the fastest step for every budget, from plain training down to the smallest that works."""

from __future__ import annotations

from collections.abc import Iterable

from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.search import Assignment, fit, smallest

__all__ = ["frontier"]


def frontier(
    keeping: StepModel, *, points: int = 8, search_s: float = 1.0, known: Iterable[Assignment] = ()
) -> list[Assignment]:
    """Assignments from the fastest to the smallest, none slower and larger than another.

    Args:
        keeping: the step.
        points: budgets to try between the plain peak and the smallest.
        search_s: for each.
        known: assignments that were found before.
    """
    plain = Assignment({}, keeping.evaluate({}))
    least = smallest(keeping, time_limit_s=2 * search_s)
    high, low = plain.outcome.peak_bytes, least.outcome.peak_bytes
    budgets = [low + (high - low) * k // points for k in range(1, points)]
    found = [plain, *known, *(fit(keeping, b, time_limit_s=search_s) for b in reversed(budgets)), least]
    kept: list[Assignment] = []
    for one in sorted(found, key=lambda a: (a.outcome.peak_bytes, a.outcome.time_s)):
        if not kept or one.outcome.time_s < kept[-1].outcome.time_s:
            kept.append(one)
    return kept[::-1]
