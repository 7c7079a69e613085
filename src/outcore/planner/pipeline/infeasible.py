"""When a budget cannot be met: the smallest that can, and how many ranks would do.

Both are found as the planner itself would find them, so what the error promises is what the next attempt gets: the
smallest budget is the peak of a plan that was cut and simulated. How many ranks would do is asked of rough cuts first,
and of at most a few careful ones.
"""

from __future__ import annotations

from outcore.machine.units import format_bytes
from outcore.planner.pipeline.search import PlanSearch, fewest_in_flight
from outcore.planner.pipeline.stage_policies import StagePlanner

_RANKS = (*range(2, 9), 10, 12, 16, 24, 32, 48, 64)
_CAREFUL = 3
_HALVINGS = 3


def refusal(search: PlanSearch, devices: int, cap: int | None, planner: StagePlanner | None = None) -> str:
    """The error that says why there is no plan, and what to ask for instead."""
    smallest = [max(predicted.peak_bytes) for predicted, _, _ in search.smallest(devices)]
    if cap is None or not smallest:
        return f"no candidate for {devices} devices could be cut"
    least = min(smallest)
    if planner is not None:
        least = _least_with_policies(search, devices, cap, least, planner)
    message = (
        f"{format_bytes(cap)} ({cap:,} bytes) per rank cannot be met with {devices} devices: the smallest that can is "
        f"{format_bytes(least)} (memory_bytes={least})"
    )
    tried = [n for n in _RANKS if devices < n <= len(search.finest)]
    careful = 0
    for ranks in tried:
        candidates = search.candidates(ranks)
        if not candidates or careful >= _CAREFUL:
            continue
        rough = [search.rough(c, "memory", None) for c in fewest_in_flight(candidates)]
        # A rough cut tells where a careful one is worth the time.
        if min((r.peak_bytes for r in rough if r is not None), default=2 * cap) <= 1.1 * cap:
            careful += 1
            if min((max(j[0].peak_bytes) for j in search.smallest(ranks)), default=2 * cap) <= cap:
                return f"{message}; or use {ranks} ranks"
    return f"{message}; more ranks ({tried[-1]} were tried) do not help" if tried else message


def _least_with_policies(search: PlanSearch, devices: int, low: int, high: int, planner: StagePlanner) -> int:
    """The smallest budget between one that cannot be met and one that can, at which policies inside stages meet it."""
    fastest = search.in_order(search.simulated(search.candidates(devices), None))[:1]
    cuts = [(candidate, stages) for _, candidate, stages in (*fastest, *search.smallest(devices))]
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        tried = (search.fitted(planner, candidate, stages, middle) for candidate, stages in cuts)
        peaks = [max(fitted[0].peak_bytes) for fitted in tried if fitted is not None]
        low, high = (low, min(peaks)) if peaks else (middle, high)
    return high
