"""Finding the stage of every unit: all partitions of small graphs, otherwise linear orders cut by dynamic programs.

What is best depends on the balance: one score compares candidates of any origin, so the order in which they are found
does not matter and the best of all is returned. From the most thorough to the quickest way:

    every partition           up to a few thousand of them: the best there is
    integer program           over all orders at once, up to some dozen units
    rows                      each of several linear orders, cut optimally; then moves of single units

Rows with more places than a program can look at are cut twice: first at places chosen evenly where little crosses, then
at all places close to the ends that were found. How many places and how many orders are looked at is bounded by work,
counted in table entries and not in seconds, so the same question always has the same answer.

For all partitions, units are numbered in an order of execution, so that one grows unit by unit: each may go into the
stage of the latest unit it depends on, or any later one. A branch is left as soon as too few units remain to fill the
stages.

Single units are then moved to a neighbouring stage. What a row cannot express (half of one branch here, the whole of
the other there) a move can: a unit may go to the next stage if nothing that depends on it stays behind, and to the one
before if all it depends on is there. Moves are taken while they lower the score; every step keeps the partition valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import comb, isqrt
from typing import Literal

import numpy as np

from outcore.errors import PlanError
from outcore.planner.partition.dynamic_programs import cut_line
from outcore.planner.partition.interval_tables import IntervalTables
from outcore.planner.partition.milp import MilpObjective, solve_integer
from outcore.planner.partition.topological_orders import coarse_places, is_row, linear_orders
from outcore.planner.partition.weighted_units import WeightedUnits
from outcore.planner.pipeline.schedule_model import Pipeline, RankLink
from outcore.program.stages import Stages

Balance = Literal["compute", "memory", "search"]
"""What to make small: the slowest stage, the largest peak of a rank, or the step."""

_PARTITIONS = 2500
_SMALL = 24
"""Units up to which all partitions are counted at all."""
_WORK = 15_000_000
"""Table entries that all row programs of one cut may look at."""
_PLACES = {"compute": 1600, "memory": 1600, "search": 300}
_PAIR_PLACES = 64
_INTEGER_VARIABLES = 120

Found = tuple[tuple[float, ...], list[int], str]
"""Score, stage of every unit, and how it was found."""


@dataclass(frozen=True)
class PartitionTask:
    """What is to be cut, into how many stages, and what is to be small."""

    pieces: WeightedUnits
    count: int
    balance: Balance
    pipeline: Pipeline
    cap: float | None
    route: RankLink

    def stages(self, stage_of: Sequence[int]) -> Stages:
        """The network cut by an assignment of units to stages, with times and bytes."""
        return self.pieces.cut(stage_of, self.count)

    def peak(self, stage_of: Sequence[int]) -> int:
        """The most that any rank holds, by closed form."""
        return max(self.pipeline.peak_bytes(self.stages(stage_of)))

    def score(self, stages: Stages) -> tuple[float, ...]:
        """Smaller is better; the excess over the cap comes first."""
        peak = float(max(self.pipeline.peak_bytes(stages)))
        excess = max(0.0, peak - self.cap) if self.cap is not None else 0.0
        if self.balance == "search":
            return excess, self.pipeline.step_s(stages, self.route)
        sent = float(sum(e.bytes * len(e.targets) * (2 if e.has_gradient else 1) for e in stages.edges))
        if self.balance == "memory":
            return excess, peak, sent
        times = [s.forward_s + s.backward_s for s in stages.stages]
        if self.pipeline.paired and len(times) > 1:
            # What a rank has to do, and the longer of its stages once more: the other replica waits for it.
            times = [a + b + max(a, b) for a, b in zip(times, reversed(times), strict=True)]
        return excess, max(times), sent

    def found(self, stage_of: list[int], how: str) -> Found:
        """An assignment with its score and how it was found, to be compared with others."""
        return self.score(self.stages(stage_of)), stage_of, how


def cut_pieces(
    pieces: WeightedUnits, count: int, balance: Balance, pipeline: Pipeline, cap: float | None, route: RankLink
) -> tuple[list[int], str]:
    """The stage of every unit, and how it was found; raises `PlanError` with the smallest cap that can be met."""
    task = PartitionTask(pieces, count, balance, pipeline, cap, route)
    every = all_partitions(pieces, count, _PARTITIONS) if len(pieces) <= _SMALL else None
    if every is not None:
        found = [task.found(stage_of, "best of all partitions") for stage_of in every]
    else:
        found = list(_candidates(task))
    if not found:
        raise PlanError(f"no way was found to cut {len(pieces)} units into {count} stages")
    score, stage_of, how = min(found, key=lambda row: row[0])
    if score[0] > 0 and cap is not None:
        return _smallest(task, [row[1] for row in found] if every is not None else None)
    return stage_of, how


def _smallest(task: PartitionTask, every: list[list[int]] | None) -> tuple[list[int], str]:
    """The cut with the smallest peak, made faster as far as the cap allows; raises if it is above the cap."""
    assert task.cap is not None
    if every is None:
        smallest, how = cut_pieces(task.pieces, task.count, "memory", task.pipeline, None, task.route)
    else:
        smallest, how = min(every, key=task.peak), "best of all partitions"
    if (least := task.peak(smallest)) > task.cap:
        raise PlanError(
            f"{task.count} stages need {least:,} bytes on the largest rank under {task.pipeline.schedule}, but only "
            f"{int(task.cap):,} are allowed; give memory_bytes={least}, more stages, or smaller micro-batches"
        )
    return improve(task.pieces, smallest, task.count, task.score), f"{how} by memory, then moves"


def _candidates(task: PartitionTask) -> Iterator[Found]:
    pieces, count = task.pieces, task.count
    rows: list[Found] = []
    left = _WORK
    for number, order in enumerate(linear_orders(pieces)):
        if left <= 0 or (number and len(pieces) > 800):
            break
        how = "chain in recorded order" if number == 0 else f"chain in order {number}"
        for stage_of, work in _row_cuts(task, order):
            rows.append(task.found(stage_of, how))
            left -= work
    yield from rows
    branches = not is_row(pieces)
    if rows and (branches or task.pipeline.paired):
        best = min(rows, key=lambda row: row[0])
        # A try costs as much as there is to look at.
        better = improve(pieces, best[1], count, task.score, tries=min(400, 60_000 // (len(pieces) + 1)))
        if better != best[1]:
            rows.append(task.found(better, f"{best[2]}, then moves"))
            yield rows[-1]
    needed = branches or (task.pipeline.paired and task.balance == "search")
    if needed and len(pieces) * (count - 1) <= _INTEGER_VARIABLES and not _is_ideal(task, rows):
        exact = solve_integer(pieces, count, task.pipeline, _aim(task))
        if exact is not None:
            yield task.found(exact, "integer program")


def _row_cuts(task: PartitionTask, order: tuple[int, ...]) -> Iterator[tuple[list[int], int]]:
    """Cuts of one order with the work they took: at all places if these are few, otherwise at some, and then again
    close to what was found."""
    pieces, count = task.pieces, task.count
    most = places_for(count, task.balance, task.pipeline, _WORK)
    places = coarse_places(pieces, order, most)
    lines = [IntervalTables(pieces, order, places)]
    whole = len(pieces) <= _PLACES["memory"] and count * len(pieces) ** 2 <= _WORK
    if task.pipeline.paired and places is not None and whole:
        lines.append(IntervalTables(pieces, order))  # too many for pairs: cut as single stages, then paired close by
    for line in lines:
        for _ in range(3):
            ends = (
                cut_line(line, count, task.balance, task.pipeline, task.cap, task.route) if count <= line.size else []
            )
            found = [line.stage_of(e) for e in ends]
            work = count * line.size**2 * (8 if task.balance == "search" else 2) // max(1, len(found))
            yield from ((stage_of, work) for stage_of in found)
            if places is None or not found:
                break
            best = min(range(len(found)), key=lambda i: task.score(task.stages(found[i])))
            line = IntervalTables(pieces, order, _near(line, ends[best], most))


def places_for(count: int, balance: Balance, pipeline: Pipeline, work: int) -> int:
    """How many places a row may have so that cutting it takes no more than so much work."""
    if pipeline.paired:
        return max(2 * count, min(_PAIR_PLACES, isqrt(work // (500 * count))))
    share = work // (3 * count * (8 if balance == "search" else 2))
    return max(2 * count, min(_PLACES[balance], isqrt(share)))


def _near(line: IntervalTables, ends: Sequence[int], most: int) -> list[int]:
    """Places around the ends of stages."""
    width = max(1, most // (2 * max(1, len(ends) - 1)))
    bounds = [int(line.places[e]) for e in ends[:-1]]
    last = len(line.order)
    return sorted({p for b in bounds for p in range(b - width, b + width) if 0 < p < last})


def _aim(task: PartitionTask) -> MilpObjective:
    limit = np.inf if task.cap is None else task.cap
    if task.balance == "memory":
        return MilpObjective(memory=1.0, cap_bytes=limit)
    if task.balance == "search":
        return MilpObjective.step(task.pieces, task.pipeline, task.route, limit)
    aim = MilpObjective(pairs=1.0) if task.pipeline.paired and task.count > 1 else MilpObjective(busiest=1.0)
    return replace(aim, cap_bytes=limit)


def _is_ideal(task: PartitionTask, found: list[Found]) -> bool:
    """Whether no cut can be better: the slowest stage is the slowest unit, or all are equal."""
    if task.balance != "compute" or not found:
        return False
    times = task.pieces.time_s
    return min(row[0] for row in found)[1] <= max(max(times), sum(times) / task.count) * (1 + 1e-12)


_STEPS = 40
"""Steps for each partition that may be found, after which the search stops: most branches may lead nowhere."""


def all_partitions(pieces: WeightedUnits, count: int, most: int) -> list[list[int]] | None:
    """Every valid way to put units into `count` stages, none empty; None if there are more than `most`."""
    before, size = pieces.units.before, len(pieces)
    if comb(size - 1, count - 1) > most:  # so many there are of the recorded order alone
        return None
    found: list[list[int]] = []
    # Stages of the first units, and which stages have a unit, as bits.
    work: list[tuple[tuple[int, ...], int]] = [((), 0)]
    for _ in range(_STEPS * most):
        if not work:
            return found
        stage_of, used = work.pop()
        unit = len(stage_of)
        if count - used.bit_count() > size - unit:
            continue
        if unit == size:
            found.append(list(stage_of))
            if len(found) > most:
                return None
            continue
        first = max((stage_of[u] for u in before[unit]), default=0)
        work.extend(((*stage_of, k), used | 1 << k) for k in range(count - 1, first - 1, -1))
    return None if work else found


Score = Callable[[Stages], tuple[float, ...]]
"""Smaller is better."""


def improve(pieces: WeightedUnits, stage_of: list[int], count: int, score: Score, *, tries: int = 400) -> list[int]:
    """The partition after all moves that help, found in at most so many tries."""
    if count == 1:
        return stage_of
    before, after = pieces.units.before, pieces.after
    best, stage_of = score(pieces.cut(stage_of, count)), list(stage_of)
    improved = True
    while improved and tries > 0:
        improved = False
        for unit, step in _moves(stage_of, count, before, after):
            k = stage_of[unit]
            neighbours = after[unit] if step > 0 else before[unit]
            # An earlier move of this round may have closed the way.
            if stage_of.count(k) == 1 or any(stage_of[u] == k for u in neighbours):
                continue
            tries -= 1
            stage_of[unit] = k + step
            found = score(pieces.cut(stage_of, count))
            if found < best:
                best, improved = found, True
            else:
                stage_of[unit] = k
            if tries <= 0:
                break
    return stage_of


def _moves(
    stage_of: list[int], count: int, before: tuple[frozenset[int], ...], after: list[set[int]]
) -> list[tuple[int, int]]:
    found = []
    for unit, k in enumerate(stage_of):
        if k + 1 < count and all(stage_of[u] > k for u in after[unit]):
            found.append((unit, 1))
        if k > 0 and all(stage_of[u] < k for u in before[unit]):
            found.append((unit, -1))
    return found
