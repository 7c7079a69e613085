"""The best cut over all linear orders at once, as an integer program.

A partition of a directed acyclic graph into stages is valid if no value flows backwards. With the binary variable
p[v, k] = "unit v is in stage k or earlier" that is p[v, k] <= p[u, k] for every u before v, which makes the relaxation
tight. What a stage holds and receives are continuous variables pushed down by the objective onto the largest of the
differences x[u, k] - x[v, k] that force them up. HiGHS solves it; graphs of some dozen units take well under a second.

HiGHS prints a line of its internals now and then, from C and whatever its options say. While it runs, the process's
standard output is redirected to nothing; what C still holds in its buffer is flushed before and after, so that lines of
others are neither lost nor let through late. What another thread prints meanwhile is lost.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from outcore.planner.partition.stage_memory import INPUT
from outcore.planner.partition.weighted_units import WeightedUnits
from outcore.planner.pipeline.schedule_model import Pipeline, RankLink

Terms = dict[int, float]
"""A linear expression: variable -> coefficient, the constant under -1."""


@dataclass(frozen=True, slots=True)
class MilpObjective:
    """What to make small: weights of several figures."""

    busiest: float = 0.0
    """The largest busy time of a stage."""
    pairs: float = 0.0
    """The largest busy time of a pair of stages, its longer one twice."""
    forward: float = 0.0
    """The largest forward."""
    messages: float = 0.0
    """All messages together."""
    gradients: float = 0.0
    """Seconds per byte of the largest gradients of a rank."""
    weights: float = 0.0
    """Seconds per byte of the largest parameters of a stage."""
    memory: float = 0.0
    """The largest memory of a rank."""
    cap_bytes: float = float("inf")
    route: RankLink | None = None
    """If given, messages count into the busy time of the stage that receives them."""

    @classmethod
    def step(cls, pieces: WeightedUnits, pipeline: Pipeline, route: RankLink, cap_bytes: float) -> MilpObjective:
        """The closed form of a step, as `Pipeline.step_s` has it."""
        m, batches, update = pipeline.micro_batches, pipeline.batches, pieces.update_bytes_per_s
        weights = (3 + 2 * pieces.state_per_parameter) / update
        if pipeline.paired:
            once = 1 / route.bytes_per_s
            return cls(
                busiest=(m - 1) * batches,
                forward=batches - 1,
                messages=(1 + batches) / 2,
                gradients=once,
                weights=weights,
                cap_bytes=cap_bytes,
                route=route,
            )
        passes = 1 if pipeline.schedule == "1f1b" else pipeline.pieces // m
        repeats = {"model_parallel": 0, "gpipe": (m - 1) * batches, "1f1b": pipeline.pieces - 1}[pipeline.schedule]
        if pipeline.schedule == "model_parallel":
            passes = pipeline.pieces
        return cls(busiest=repeats, messages=passes, weights=weights, cap_bytes=cap_bytes, route=route)


def solve_integer(
    pieces: WeightedUnits, count: int, pipeline: Pipeline, aim: MilpObjective, *, limit_s: float = 5.0
) -> list[int] | None:
    """The stage of every unit, or None if there is no solution or it was not found in time."""
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import csr_array

    program = _Program(pieces, count, pipeline, aim)
    rows, columns, figures, bounds = [], [], [], []
    for r, (terms, least) in enumerate(program.rows):
        for variable, factor in terms.items():
            if variable >= 0:
                rows.append(r)
                columns.append(variable)
                figures.append(factor)
        bounds.append(least - terms.get(-1, 0.0))
    size = len(program.integral)
    matrix = csr_array((figures, (rows, columns)), shape=(len(bounds), size))
    objective = np.zeros(size)
    for variable, factor in program.objective.items():
        objective[variable] += factor
    upper = np.where(program.integral, 1.0, np.inf)
    with quiet():
        answer = milp(
            objective,
            constraints=LinearConstraint(matrix, np.array(bounds), np.inf),
            integrality=np.array(program.integral, dtype=int),
            bounds=(np.zeros(size), upper),
            options={"time_limit": limit_s, "mip_rel_gap": 1e-9},
        )
    if answer.x is None:
        return None
    found = answer.x
    return [sum(1 for k in range(count - 1) if found[v * (count - 1) + k] < 0.5) for v in range(len(pieces))]


@dataclass(frozen=True, slots=True)
class _Memory:
    """What a stage holds, as expressions."""

    always: Terms
    moving: list[Terms]
    """Alternatives, each of them held at some time."""
    single: Terms
    incoming: Terms


class _Program:
    """Variables and rows ``terms >= least``."""

    def __init__(self, pieces: WeightedUnits, count: int, pipeline: Pipeline, aim: MilpObjective) -> None:
        self.pieces, self.count, self.pipeline, self.aim = pieces, count, pipeline, aim
        n = len(pieces)
        self.integral = [True] * (n * (count - 1))
        self.rows: list[tuple[Terms, float]] = []
        self.objective: Terms = {}
        self.time_scale = max(sum(pieces.time_s), 1e-30)
        self.byte_scale = float(
            max(sum(f.bytes for f in pieces.memory_uses) + sum(b for _, b, _ in pieces.parameters), 1)
        )
        for v in range(n):
            for k in range(count - 2):
                self.at_least({v * (count - 1) + k + 1: 1.0, v * (count - 1) + k: -1.0}, 0.0)
            for u in pieces.units.before[v]:
                for k in range(count - 1):
                    self.at_least({u * (count - 1) + k: 1.0, v * (count - 1) + k: -1.0}, 0.0)
        for k in range(count):
            self.at_least(self.total([self.inside(v, k) for v in range(n)]), 1.0)
        received = self.received()
        if aim.busiest or aim.pairs:
            self.busy(received)
        if aim.forward:
            times = [t / self.time_scale for t in pieces.forward_s]
            self.largest(aim.forward, [self.total(self.column(k), times) for k in range(count)])
        if aim.gradients or aim.weights:
            self.updates()
        for flow, places in zip(pieces.flows, received, strict=True):
            ways = 2 if flow.has_gradient else 1
            amount = flow.bytes if aim.route is None else aim.route.time_s(flow.bytes)
            scale = self.byte_scale if aim.route is None else self.time_scale
            for variable in places:
                self.minimise({variable: aim.messages * ways * amount / scale})
        if aim.memory or np.isfinite(aim.cap_bytes):
            self.memory(received)

    def variable(self) -> int:
        self.integral.append(False)
        return len(self.integral) - 1

    def at_least(self, terms: Terms, least: float) -> None:
        self.rows.append((terms, least))

    def minimise(self, terms: Terms) -> None:
        for variable, factor in terms.items():
            self.objective[variable] = self.objective.get(variable, 0.0) + factor

    def inside(self, v: int, k: int) -> Terms:
        """1 if unit v is in stage k."""
        at = v * (self.count - 1)
        if self.count == 1:
            return {-1: 1.0}
        if k == 0:
            return {at: 1.0}
        if k == self.count - 1:
            return {-1: 1.0, at + k - 1: -1.0}
        return {at + k: 1.0, at + k - 1: -1.0}

    def total(self, parts: Sequence[Terms], factors: Sequence[float] | None = None) -> Terms:
        found: Terms = {}
        for i, terms in enumerate(parts):
            for variable, factor in terms.items():
                found[variable] = found.get(variable, 0.0) + factor * (1.0 if factors is None else factors[i])
        return found

    def above(self, variable: int, terms: Terms) -> None:
        """Constrain a variable to be at least an expression."""
        self.at_least(self.total([{variable: 1.0}, terms], [1.0, -1.0]), 0.0)

    def users(self, users: Sequence[int], to_loss: bool, k: int) -> list[Terms]:
        found = [self.inside(u, k) for u in users]
        return [*found, {-1: 1.0 if k == self.count - 1 else 0.0}] if to_loss else found

    def received(self) -> list[list[int]]:
        """Per flow and stage a variable that is 1 if the stage receives it."""
        found = []
        for flow in self.pieces.flows:
            places = []
            for k in range(self.count):
                places.append(variable := self.variable())
                made_here = self.inside(flow.producer, k)
                for user in self.users(flow.users, flow.to_loss, k):
                    self.above(variable, self.total([user, made_here], [1.0, -1.0]))
            found.append(places)
        return found

    def busy(self, received: list[list[int]]) -> None:
        times = [t / self.time_scale for t in self.pieces.time_s]
        loads = []
        for k in range(self.count):
            load = self.total(self.column(k), times)
            if self.aim.route is not None:
                for flow, places in zip(self.pieces.flows, received, strict=True):
                    ways = 2 if flow.has_gradient else 1
                    load[places[k]] = ways * self.aim.route.time_s(flow.bytes) / self.time_scale
            loads.append(load)
        if self.aim.busiest:
            self.largest(self.aim.busiest, loads)
        if self.aim.pairs:
            self.largest(
                self.aim.pairs, [self.total(both, [2.0, 1.0]) for both in zip(loads, loads[::-1], strict=True)]
            )

    def updates(self) -> None:
        loads = []
        for k in range(self.count):
            owned = [self.any_of([self.inside(u, k) for u in users]) for _, _, users in self.pieces.parameters]
            loads.append(self.total(owned, [nbytes / self.byte_scale for _, nbytes, _ in self.pieces.parameters]))
        scale = self.byte_scale / self.time_scale
        self.largest(self.aim.weights * scale, loads)
        if self.aim.gradients:
            pairs = [self.total(both) for both in zip(loads, loads[::-1], strict=True)]
            self.largest(self.aim.gradients * scale, pairs)

    def column(self, k: int) -> list[Terms]:
        """Which units are in stage k."""
        return [self.inside(v, k) for v in range(len(self.pieces))]

    def largest(self, weight: float, loads: Sequence[Terms]) -> None:
        """Make the largest of the expressions small."""
        variable = self.variable()
        self.minimise({variable: weight})
        for load in loads:
            self.above(variable, load)

    def memory(self, received: list[list[int]]) -> None:
        largest = self.variable()
        self.minimise({largest: self.aim.memory})
        if np.isfinite(self.aim.cap_bytes):
            self.at_least({largest: -1.0}, -self.aim.cap_bytes / self.byte_scale * (1 + 1e-9))
        stages = [self.stage_memory(k, received) for k in range(self.count)]
        for k, one in enumerate(stages):
            if not self.pipeline.paired:
                for moving in one.moving:
                    self.above(largest, self.total([one.always, moving]))
                continue
            two, batches = stages[self.count - 1 - k], self.pipeline.batches
            always = one.always if two is one or batches == 1 else self.total([one.always, two.always])
            some = list(one.moving)
            if batches > 1:
                some += [*two.moving, self.total([one.single, two.incoming])]
            if batches > 2:
                some.append(self.total([two.single, one.incoming]))
            for terms in some:
                self.above(largest, self.total([always, terms]))

    def stage_memory(self, k: int, received: list[list[int]]) -> _Memory:
        """What stage k always holds, and what it may hold while a step runs (see `Pipeline.loads`)."""
        pieces, scale = self.pieces, self.byte_scale
        owned = [(self.any_of([self.inside(u, k) for u in users]), nbytes) for _, nbytes, users in pieces.parameters]
        fixed = [(self.any_of([self.inside(u, k) for u in users]), nbytes) for _, nbytes, users in pieces.fixed]
        always: Terms = {}
        for rows, copies in ((owned, 2.0 + pieces.state_per_parameter), (fixed, 1.0)):
            always = self.total([always, *(here for here, _ in rows)], [1.0, *(copies * n / scale for _, n in rows)])
        temporary: Terms = {(workspace := self.variable()): 1.0}
        for v, nbytes in enumerate(pieces.workspace_bytes):
            if nbytes:
                self.above(workspace, self.total([self.inside(v, k)], [nbytes / scale]))
        held: Terms = {}
        for memory_use in pieces.memory_uses:
            reasons = [self.inside(u, k) for u in memory_use.savers]
            reading = self.users(memory_use.users, memory_use.to_loss, k)
            if memory_use.producer == INPUT:
                reasons += reading
            else:
                made_here = self.inside(memory_use.producer, k)
                reasons += [self.total([u, made_here], [s, -s]) for u in reading for s in (1.0, -1.0)]
            held = self.total([held, self.any_of(reasons)], [1.0, memory_use.bytes / scale])
        incoming: Terms = {}
        leaving: Terms = {}
        for flow, places in zip(pieces.flows, received, strict=True):
            incoming[places[k]] = flow.bytes / scale
            if flow.has_gradient:
                temporary = self.total([temporary, {places[k]: flow.bytes / scale}])
                sent = self.sent(flow.producer, places, k)
                leaving = self.total([leaving, sent], [1.0, flow.bytes / scale])
        temporary = self.total([temporary, leaving])
        full = self.total([held, temporary], [float(self.pipeline.in_flight(k, self.count)), 1.0])
        gradient, value = self.pipeline.waits_for(k, self.count)
        waiting = [*([leaving] if gradient else []), *([incoming] if value else [])]
        moving = [*([self.total([full, more]) for more in waiting] or [full]), *self.update_memory(owned)]
        return _Memory(always, moving, self.total([held, temporary]), incoming)

    def update_memory(self, owned: Sequence[tuple[Terms, int]]) -> list[Terms]:
        """What the optimizer's step of a stage needs on top, whose parameters these are."""
        of_all, of_largest = self.pieces.update_workspace
        if not of_all and not of_largest:
            return []
        largest = self.variable()
        for here, nbytes in owned:
            self.above(largest, self.total([here], [nbytes / self.byte_scale]))
        every = [of_all * nbytes / self.byte_scale for _, nbytes in owned]
        return [self.total([*(here for here, _ in owned), {largest: 1.0}], [*every, of_largest])]

    def sent(self, producer: int, places: list[int], k: int) -> Terms:
        """To how many stages the value goes if its producer is in stage k, else at least 0."""
        variable = self.variable()
        absent = self.total([{-1: 1.0}, self.inside(producer, k)], [1.0, -1.0])
        everywhere = self.total([dict.fromkeys(places, 1.0), absent], [1.0, -float(self.count)])
        self.above(variable, everywhere)
        # A tighter relaxation: at least one stage, if any unit that reads it is elsewhere.
        made_here = self.inside(producer, k)
        for j, place in enumerate(places):
            if j > k:
                self.above(variable, self.total([{place: 1.0}, made_here, {-1: 1.0}], [1.0, 1.0, -1.0]))
        return {variable: 1.0}

    def any_of(self, reasons: Sequence[Terms]) -> Terms:
        """A variable that is at least each of the expressions, and 0."""
        if len(reasons) == 1:
            lowest = sum(factor for v, factor in reasons[0].items() if v < 0 or factor < 0)
            if lowest >= 0:
                return reasons[0]
        variable = self.variable()
        for terms in reasons:
            self.above(variable, terms)
        return {variable: 1.0}


_STDOUT = 1


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which nothing is written to the process's standard output."""
    try:
        kept = os.dup(_STDOUT)
    except OSError:  # there is none
        yield
        return
    _flush()
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, _STDOUT)
        yield
    finally:
        _flush()
        os.dup2(kept, _STDOUT)
        os.close(nothing)
        os.close(kept)


def _flush() -> None:
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    with suppress(OSError, TypeError, AttributeError):  # no such library outside of Unix
        ctypes.CDLL(None).fflush(None)
