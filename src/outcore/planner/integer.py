"""The best cut over all linear orders at once, as an integer program.

A partition of a directed acyclic graph into stages is valid if no value flows backwards. With the binary variable
p[v, k] = "unit v is in stage k or earlier" that is p[v, k] <= p[u, k] for every u before v, which makes the relaxation
tight. What a stage holds and receives are continuous variables pushed down by the objective onto the largest of the
differences x[u, k] - x[v, k] that force them up. HiGHS solves it; graphs of some dozen units take well under a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outcore.planner.pieces import INPUT, Pieces
from outcore.planner.pipeline import Pipeline, Route

__all__ = ["Aim", "solve_integer"]

Terms = dict[int, float]
"""A linear expression: variable -> coefficient, the constant under -1."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What to make small: weights of the largest busy time, of all messages, and of the largest memory of a rank."""

    busiest: float = 0.0
    messages: float = 0.0
    memory: float = 0.0
    cap_bytes: float = float("inf")
    route: Route | None = None
    """If given, messages count into the busy time of the stage that receives them."""


def solve_integer(
    pieces: Pieces, count: int, pipeline: Pipeline, aim: Aim, *, limit_s: float = 5.0
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


class _Program:
    """Variables and rows ``terms >= least``."""

    def __init__(self, pieces: Pieces, count: int, pipeline: Pipeline, aim: Aim) -> None:
        self.pieces, self.count, self.pipeline, self.aim = pieces, count, pipeline, aim
        n = len(pieces)
        self.integral = [True] * (n * (count - 1))
        self.rows: list[tuple[Terms, float]] = []
        self.objective: Terms = {}
        self.time_scale = max(sum(pieces.time_s), 1e-30)
        self.byte_scale = float(max(sum(f.bytes for f in pieces.families) + sum(b for _, b, _ in pieces.parameters), 1))
        for v in range(n):
            for k in range(count - 2):
                self.at_least({v * (count - 1) + k + 1: 1.0, v * (count - 1) + k: -1.0}, 0.0)
            for u in pieces.units.before[v]:
                for k in range(count - 1):
                    self.at_least({u * (count - 1) + k: 1.0, v * (count - 1) + k: -1.0}, 0.0)
        for k in range(count):
            self.at_least(self.total([self.inside(v, k) for v in range(n)]), 1.0)
        received = self.received()
        if aim.busiest:
            self.busy(received)
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
        """The variable is at least the expression."""
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
                home = self.inside(flow.producer, k)
                for user in self.users(flow.users, flow.to_loss, k):
                    self.above(variable, self.total([user, home], [1.0, -1.0]))
            found.append(places)
        return found

    def busy(self, received: list[list[int]]) -> None:
        largest = self.variable()
        self.minimise({largest: self.aim.busiest})
        times = [t / self.time_scale for t in self.pieces.time_s]
        loads = []
        for k in range(self.count):
            load = self.total([self.inside(v, k) for v in range(len(self.pieces))], times)
            if self.aim.route is not None:
                for flow, places in zip(self.pieces.flows, received, strict=True):
                    ways = 2 if flow.has_gradient else 1
                    load[places[k]] = ways * self.aim.route.time_s(flow.bytes) / self.time_scale
            loads.append(load)
        for k, load in enumerate(loads):
            if self.pipeline.paired and self.count > 1:
                load = self.total([load, loads[self.count - 1 - k]], [2.0, 1.0])
            self.above(largest, load)

    def memory(self, received: list[list[int]]) -> None:
        always, moving = [], []
        for k in range(self.count):
            a, m = self.stage_memory(k, received)
            always.append(a)
            moving.append(m)
        largest = self.variable()
        self.minimise({largest: self.aim.memory})
        if np.isfinite(self.aim.cap_bytes):
            self.at_least({largest: -1.0}, -self.aim.cap_bytes / self.byte_scale * (1 + 1e-9))
        for k in range(self.count):
            if self.pipeline.paired:
                both = self.total([always[k], always[self.count - 1 - k]])
                self.above(largest, self.total([both, moving[k]]))
                self.above(largest, self.total([both, moving[self.count - 1 - k]]))
            else:
                self.above(largest, self.total([always[k], moving[k]]))

    def stage_memory(self, k: int, received: list[list[int]]) -> tuple[Terms, Terms]:
        """What stage k always holds, and what it holds while a step runs."""
        pieces, scale = self.pieces, self.byte_scale
        always = self.total([self.inside(v, k) for v in range(len(pieces))], [b / scale for b in pieces.fixed_bytes])
        for _, nbytes, users in pieces.parameters:
            here = self.any_of([self.inside(u, k) for u in users])
            always = self.total([always, here], [1.0, (2.0 + pieces.state_per_parameter) * nbytes / scale])
        moving: Terms = {(workspace := self.variable()): 1.0}
        for v, nbytes in enumerate(pieces.workspace_bytes):
            if nbytes:
                self.above(workspace, self.total([self.inside(v, k)], [nbytes / scale]))
        in_flight = self.pipeline.in_flight(k, self.count)
        for family in pieces.families:
            reasons = [self.inside(u, k) for u in family.keepers]
            reading = self.users(family.users, family.to_loss, k)
            if family.producer == INPUT:
                reasons += reading
            else:
                home = self.inside(family.producer, k)
                reasons += [self.total([u, home], [s, -s]) for u in reading for s in (1.0, -1.0)]
            moving = self.total([moving, self.any_of(reasons)], [1.0, in_flight * family.bytes / scale])
        for flow, places in zip(pieces.flows, received, strict=True):
            if flow.has_gradient:
                home = self.inside(flow.producer, k)
                sent = [self.total([home, u], [1.0, -1.0]) for u in self.users(flow.users, flow.to_loss, k)]
                both = self.total([{places[k]: 1.0}, self.any_of(sent)])
                moving = self.total([moving, both], [1.0, flow.bytes / scale])
        return always, moving

    def any_of(self, reasons: Sequence[Terms]) -> Terms:
        """At least each of the expressions, and 0."""
        if len(reasons) == 1:
            lowest = sum(factor for v, factor in reasons[0].items() if v < 0 or factor < 0)
            if lowest >= 0:
                return reasons[0]
        variable = self.variable()
        for terms in reasons:
            self.above(variable, terms)
        return {variable: 1.0}
