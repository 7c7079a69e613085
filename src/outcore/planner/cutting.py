"""Finding the stage of every unit: linear orders cut by dynamic programs, then moves, then an integer program.

What is best depends on the balance: a score compares candidates of any origin by the same ruler, so the order in which
they are found does not matter and the best of all is returned. Rows with more places than a program can look at are cut
twice: first at places chosen evenly where little crosses, then at all places close to the ends that were found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from outcore.errors import PlanError
from outcore.planner.chain import cheapest, fastest, smallest_maximum, smallest_pair
from outcore.planner.integer import Aim, solve_integer
from outcore.planner.line import Line, Table
from outcore.planner.moves import improve
from outcore.planner.orders import coarse_places, is_row, linear_orders
from outcore.planner.pieces import Pieces
from outcore.planner.pipeline import Pipeline, Route
from outcore.program.stages import Stages

__all__ = ["Balance", "QuickCut", "cut_pieces"]

Balance = Literal["compute", "memory", "search"]
"""What to make small: the slowest stage, the largest peak of a rank, or the step."""

_PLACES = 1600
_SEARCH_PLACES = 300
_PAIR_PLACES = 64
_INTEGER_VARIABLES = 120


def cut_pieces(
    pieces: Pieces, count: int, balance: Balance, pipeline: Pipeline, cap: float | None, route: Route
) -> tuple[list[int], str]:
    """The stage of every unit, and how it was found."""
    score = _score(balance, pipeline, cap, route)
    found: list[tuple[tuple[float, ...], list[int], str]] = []
    for number, order in enumerate(linear_orders(pieces)):
        if number and len(pieces) > 800:
            break
        how = "chain in recorded order" if number == 0 else f"chain in order {number}"
        for stage_of in _row_cuts(pieces, order, count, balance, pipeline, cap, route):
            found.append((score(pieces.cut(stage_of, count)), stage_of, how))
    branches = not is_row(pieces)
    if found:
        best = min(found, key=lambda row: row[0])
        if branches or pipeline.paired:
            # A try costs as much as there is to look at.
            better = improve(pieces, best[1], count, score, tries=min(400, 100_000 // (len(pieces) + 1)))
            if better != best[1]:
                best = score(pieces.cut(better, count)), better, f"{best[2]}, then moves"
            found.append(best)
    if (
        branches
        and count > 1
        and len(pieces) * (count - 1) <= _INTEGER_VARIABLES
        and not _is_ideal(pieces, count, balance, found)
    ):
        aim = _aim(balance, pipeline, cap, route)
        exact = solve_integer(pieces, count, pipeline, aim) if aim is not None else None
        if exact is not None:
            found.append((score(pieces.cut(exact, count)), exact, "integer program"))
    allowed = [row for row in found if cap is None or max(pipeline.peak_bytes(pieces.cut(row[1], count))) <= cap]
    if not allowed and cap is not None:
        # The smallest peak there is, made faster as far as the cap allows.
        smallest, how = cut_pieces(pieces, count, "memory", pipeline, None, route)
        least = max(pipeline.peak_bytes(pieces.cut(smallest, count)))
        if least > cap:
            raise PlanError(_refusal(count, pipeline, cap, least))
        better = improve(pieces, smallest, count, score)
        allowed = [(score(pieces.cut(better, count)), better, f"{how} by memory, then moves")]
    if not allowed:
        raise PlanError(f"no way was found to cut {len(pieces)} units into {count} stages")
    best = min(allowed, key=lambda row: row[0])
    return best[1], best[2]


def _row_cuts(
    pieces: Pieces,
    order: tuple[int, ...],
    count: int,
    balance: Balance,
    pipeline: Pipeline,
    cap: float | None,
    route: Route,
) -> Iterator[list[int]]:
    """Cuts of one order: at all places if these are few, otherwise at some, and then again close to what was found."""
    most = max(2 * count, _PAIR_PLACES) if pipeline.paired else _SEARCH_PLACES if balance == "search" else _PLACES
    places = coarse_places(pieces, order, most)
    starts = [Line(pieces, order, places)]
    if pipeline.paired and places is not None and len(pieces) <= _PLACES:
        starts.append(Line(pieces, order))  # too many for pairs: cut as single stages, then paired close by
    for line in starts:
        ends = _cut_line(line, count, balance, pipeline, cap, route) if count <= line.size else None
        for _ in range(3):
            if ends is None:
                break
            yield line.stage_of(ends)
            if places is None:
                break
            line = Line(pieces, order, _near(line, ends, most))
            ends = _cut_line(line, count, balance, pipeline, cap, route)


def _near(line: Line, ends: Sequence[int], most: int) -> list[int]:
    """Places around the ends of stages."""
    width = max(1, most // (2 * max(1, len(ends) - 1)))
    bounds = [int(line.places[e]) for e in ends[:-1]]
    last = len(line.order)
    return sorted({p for b in bounds for p in range(b - width, b + width) if 0 < p < last})


class QuickCut:
    """Cuts at few places of the recorded order only, for ranking many candidates; tables are kept between cuts."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self._lines: dict[int, Line] = {}

    def cut(
        self, count: int, balance: Balance, pipeline: Pipeline, cap: float | None, route: Route
    ) -> list[int] | None:
        """The stage of every unit, or None if these places do not do."""
        most = max(3 * count, 24 if pipeline.paired else 64)
        if most not in self._lines:
            order = tuple(range(len(self.pieces)))
            self._lines[most] = Line(self.pieces, order, coarse_places(self.pieces, order, most))
        line = self._lines[most]
        if count > line.size:
            return None
        ends = _cut_line(line, count, balance, pipeline, cap, route)
        return None if ends is None else line.stage_of(ends)


def _cut_line(
    line: Line, count: int, balance: Balance, pipeline: Pipeline, cap: float | None, route: Route
) -> list[int] | None:
    always = line.always_bytes()
    moving = [line.moving_bytes(pipeline, k, count) for k in range(count)]
    if pipeline.paired and line.size > 2 * _PAIR_PLACES:
        # Too many places to look at all pairs of them: every stage as if its partner held as much.
        answer = smallest_maximum([2 * always + m for m in moving])
        return None if answer is None else answer[0]
    if pipeline.paired and count > 1:
        if balance == "compute" and cap is None:
            answer = smallest_pair(line.time_s, [line.time_s] * count, count=count)
        else:
            answer = smallest_pair(always, moving, np.inf if cap is None else cap, count)
        return None if answer is None else answer[0]
    memory = [always + m for m in moving]
    allowed = [m <= (np.inf if cap is None else cap) for m in memory]
    if balance == "memory":
        return _refined(memory, [line.message_bytes] * count, allowed)
    if balance == "compute":
        return _refined([line.time_s] * count, [line.message_bytes] * count, allowed)
    messages = line.message_s(route)
    extra = [np.where(a, messages, np.inf) for a in allowed]
    if pipeline.schedule == "model_parallel" or pipeline.micro_batches == 1:
        answer = cheapest(extra)
    else:
        busy = [np.where(a, line.time_s + messages, np.inf) for a in allowed]
        answer = fastest(busy, extra, pipeline.micro_batches - 1)
    return None if answer is None else answer[0]


def _refined(
    costs: Sequence[Table], messages: Sequence[Table], allowed: Sequence[NDArray[np.bool_]]
) -> list[int] | None:
    """The smallest maximum, and among cuts that reach it the one with the fewest bytes between stages."""
    answer = smallest_maximum([np.where(a, c, np.inf) for c, a in zip(costs, allowed, strict=True)])
    if answer is None:
        return None
    limit = answer[1] * (1 + 1e-12)
    again = cheapest([np.where(a & (c <= limit), m, np.inf) for c, m, a in zip(costs, messages, allowed, strict=True)])
    return answer[0] if again is None else again[0]


def _score(
    balance: Balance, pipeline: Pipeline, cap: float | None, route: Route
) -> Callable[[Stages], tuple[float, ...]]:
    def score(stages: Stages) -> tuple[float, ...]:
        peak = float(max(pipeline.peak_bytes(stages)))
        excess = max(0.0, peak - cap) if cap is not None else 0.0
        if balance == "search":
            return excess, pipeline.step_s(stages, route)
        sent = float(sum(e.bytes * len(e.targets) * (2 if e.has_gradient else 1) for e in stages.edges))
        if balance == "memory":
            return excess, peak, sent
        times = [s.forward_s + s.backward_s for s in stages.stages]
        if pipeline.paired and len(times) > 1:
            # What a rank has to do, and the longer of its stages once more: the other replica waits for it.
            times = [a + b + max(a, b) for a, b in zip(times, reversed(times), strict=True)]
        return excess, max(times), sent

    return score


def _aim(balance: Balance, pipeline: Pipeline, cap: float | None, route: Route) -> Aim | None:
    limit = np.inf if cap is None else cap
    if balance == "compute":
        return Aim(busiest=1.0, cap_bytes=limit)
    if balance == "memory":
        return Aim(memory=1.0, cap_bytes=limit)
    if pipeline.paired:
        return None
    repeats = 0 if pipeline.schedule == "model_parallel" else pipeline.micro_batches - 1
    return Aim(busiest=float(repeats), messages=1.0, cap_bytes=limit, route=route)


def _is_ideal(
    pieces: Pieces, count: int, balance: Balance, found: list[tuple[tuple[float, ...], list[int], str]]
) -> bool:
    """Whether no cut can be better: the slowest stage is the slowest unit, or all are equal."""
    if balance != "compute" or not found:
        return False
    bound = max(max(pieces.time_s), sum(pieces.time_s) / count)
    return min(row[0] for row in found)[1] <= bound * (1 + 1e-12)


def _refusal(count: int, pipeline: Pipeline, cap: float, least: int) -> str:
    return (
        f"{count} stages need {least:,} bytes on the largest rank under {pipeline.schedule}, but only {int(cap):,} are "
        f"allowed; give memory_bytes={least}, more stages, or smaller micro-batches"
    )
