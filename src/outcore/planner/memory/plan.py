"""A plan for one device: the policies of a network's buffers under a budget, with what they cost and why.

`plan_memory` is the planner of `outcore.within`: from a graph with its costs to the fastest assignment that stays
within the budget, as a document (`Plan.policy`) and as an explanation.

`frontier` gives time against memory: the fastest step for every budget, from plain training down to the smallest
budget that works.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from outcore.cost.costs import Costs
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.machine.units import format_bytes, rounded_up
from outcore.ops.recompute_encode import LOSSY
from outcore.planner.memory.buckets import OffloadableParams
from outcore.planner.memory.chunked_region import ChunkedRegion
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.evaluate import StepModel, StepUnderPolicies
from outcore.planner.memory.explain import explain, place
from outcore.planner.memory.memory_format import MemoryFormat
from outcore.planner.memory.script import emit, link_of, one_stage, stage_of
from outcore.planner.memory.search import Assignment, fit, smallest
from outcore.planner.memory.state_policy import StatePolicy
from outcore.planner.memory.state_residency import StateSavings
from outcore.program import Program, Timeline, simulate
from outcore.program.plan.document import Exactness, Plan, PredictedStep
from outcore.program.plan.stage_names import name_stages
from outcore.program.policies import Policies, Policy, parse_policies, policies_to_json
from outcore.program.script import Script

_LARGE = 1500
"""Calls of a network whose search may take twice as long as that of a small one."""
_LEAST: dict[tuple[str, int, bool], Policies] = {}
"""Networks whose budget was refused -> the policies of the smallest that was named, which has to do when given."""
_REMEMBERED = 32
_FASTER = 0.97
"""What a step must take over another, by prediction, to be preferred to one that moves less state."""


@dataclass(frozen=True)
class MemoryPlan:
    """Policies, what they were chosen from, and what a step takes under them."""

    keeping: StepModel
    assignment: Assignment
    budget_bytes: int | None
    reserved_bytes: int
    """Memory that the step needs beside the network throughout: a margin."""
    state: StatePolicy = field(default_factory=StatePolicy)
    """Where parameters, gradients and optimizer state live."""
    state_s: float = 0.0
    """What that costs."""
    reassociated: bool = False
    """Norms may round in another order."""
    loss_bytes: int = 0
    """What the loss adds to the last moment of forward."""
    order: MemoryFormat = field(default_factory=MemoryFormat)
    """Of images inside the network."""
    known_plain_bytes: int | None = None
    """The peak of plain training with its loss, where that was recorded too."""
    known_plain_s: float | None = None
    """The time of a plain step with its loss and the optimizer's, where that is known."""
    chunked: ChunkedRegion | None = None
    """The last layer and its loss, where they run in chunks."""

    @cached_property
    def policy(self) -> dict[str, Policy]:
        """What is not kept as autograd would, by the first value in each buffer."""
        return self.keeping.resolved(self.assignment.policy)

    @cached_property
    def script(self) -> tuple[Script, Script]:
        """The forward and the backward of a step, call by call: what runs."""
        return emit(self.keeping, self.assignment.policy)

    @property
    def program(self) -> Program:
        """A step as a program of one stage."""
        return one_stage(self.keeping, self.assignment.policy)

    def simulate(self) -> Timeline:
        """The timeline of a step, with its copies and its memory."""
        return simulate(self.program, stage_of(self.keeping), link_of(self.keeping.tier))

    @property
    def outcome(self) -> StepUnderPolicies:
        """Predicted time and peak of a step under the chosen policies."""
        return self.assignment.outcome

    @property
    def peak_bytes(self) -> int:
        """Predicted peak; where all is kept and stays, that of plain training."""
        if self.known_plain_bytes is not None and not self.policy and self.state == StatePolicy():
            return self.known_plain_bytes
        return self.outcome.peak_bytes + self.reserved_bytes

    @property
    def plain_bytes(self) -> int:
        """Predicted peak of plain training."""
        if self.known_plain_bytes is not None:
            return self.known_plain_bytes
        if self.order.plain_bytes is not None:
            return self.order.plain_bytes + self.reserved_bytes
        plain = self.keeping.plain
        turn = plain.moments[self.keeping.turn - 1].bytes.total + self.loss_bytes if self.loss_bytes else 0
        return max(plain.peak_bytes, turn) + self.reserved_bytes

    @property
    def time_s(self) -> float:
        """Predicted seconds of a step."""
        known_s = self.known_plain_s
        return (self.outcome.time_s if known_s is None else known_s + self.outcome.extra_s) + self.state_s

    @property
    def slowdown(self) -> float:
        """Predicted time over that of plain training."""
        if self.known_plain_s:
            return self.time_s / self.known_plain_s
        plain_s = self.order.plain_s if self.order.plain_s is not None else self.keeping.plain_s
        return self.time_s / plain_s if plain_s else 1.0

    @property
    def exactness(self) -> Exactness:
        """How the results compare with those of plain training."""
        if any(how.codec in LOSSY for how in self.policy.values()):
            return "lossy"
        return "reassociated" if self.reassociated else "bitwise"

    def document(self) -> Plan:
        """The plan as a document."""
        graph = self.keeping.graph
        return Plan(
            graph=graph.fingerprint,
            stages=name_stages(graph, [list(graph.calls)]),
            policy=policies_to_json(self.policy),
            exactness=self.exactness,
            state=self.state.to_json(),
            memory_order=self.order.name,
            memory_bytes=self.budget_bytes,
            predicted=PredictedStep(self.time_s, (self.peak_bytes,), 0.0, "memory curve"),
            why=tuple(self.explain().splitlines()),
        )

    def explain(self, depth: int = 1, *, timed: bool = True) -> str:
        """What was chosen and what it costs, by block."""
        return explain(self, depth, timed=timed)


def plan_memory(
    graph: Graph,
    costs: Costs,
    *,
    budget_bytes: int | None,
    optimizer: OptimizerCost | float = 2.0,
    tier: OffloadTarget | None = None,
    memory_bytes_per_s: float = 10e9,
    reserved_bytes: int = 0,
    margin: float = 0.0,
    rounding_bytes: int = 0,
    loss_bytes: int = 0,
    policy: Mapping[str, str | Policy] | None = None,
    time_limit_s: float = 1.0,
    states: Sequence[StatePolicy] = (StatePolicy(),),
    offloadable: OffloadableParams | None = None,
    draws: bool = True,
    standing: bool = False,
    near: Policies | None = None,
    least: Policies | None = None,
) -> MemoryPlan:
    """The fastest step within a budget.

    Args:
        graph: the network.
        costs: its costs, with times.
        budget_bytes: the most a step may hold; none for the fastest whatever it holds.
        optimizer: what its state takes.
        tier: the slower memory below the device; none to move nothing.
        memory_bytes_per_s: how fast the device's own memory is.
        reserved_bytes: to leave free.
        margin: share of the budget to leave free beside that.
        rounding_bytes: at most so many more, and a 200th of the plain step: what an allocator gives too much.
        loss_bytes: what the loss holds beside the model's output and its gradient.
        policy: chosen by hand.
        time_limit_s: for each part of the search; large networks have up to as much again.
        states: policies for parameters, gradients and optimizer state; a later one is taken if none before it meets
            the budget, or if the step is faster by a few percent then, because more values can stay.
        offloadable: the parameters that can leave the device; all of them if it is not said.
        draws: whether what draws random numbers may be made again.
        standing: whether gradients have memory of their own from the beginning, to which they are copied.
        near: the assignment that was found for a budget that was a little larger, to start from.
        least: the assignment with the smallest peak that was found before, should nothing else do.

    Raises:
        PlanError: nothing fits; names the smallest budget that does.
    """
    keeping = StepModel(graph, costs, optimizer, tier, memory_bytes_per_s, draws=draws)
    if standing:
        there = np.array([moment.bytes.gradients for moment in keeping.plain.moments])
        keeping.base = keeping.base + there.max() - there + np.maximum(np.diff(there, prepend=0), 0)
    if policy is not None and (unknown := [name for name in policy if name not in keeping.buffers]):
        raise PlanError(f"the plan names {unknown[0]}, which is not the first value in any memory of the network")
    reserved_bytes += min(rounding_bytes, keeping.plain.peak_bytes // 200)
    reserved = reserved_bytes + int(margin * (budget_bytes or 0))
    most = budget_bytes - reserved if budget_bytes is not None else 2**62
    at_turn = _at_turn(keeping, graph, loss_bytes) if loss_bytes else 0
    keeping.base[keeping.turn - 1] += at_turn

    if policy is not None:
        states = states[:1]
    network = graph.fingerprint, keeping.plain.peak_bytes, draws
    least = least if least is not None else _LEAST.get(network)
    base, best, refused = keeping.base, None, None
    time_limit_s *= 1 + min(1.0, len(keeping.order) / _LARGE)
    for where in states:
        savings = _savings(keeping, where, optimizer, offloadable)
        keeping.base = base + savings.bytes if savings is not None else base
        moving_s = savings.time_s if savings is not None else 0.0
        if policy is not None:
            best = _Choice(_by_hand(keeping, policy), where, moving_s, keeping.base)
            break
        if best is not None and keeping.plain_s + moving_s > _FASTER * best.time_s:
            continue
        if where is not states[-1] and keeping.floor[0] > most:
            continue  # one operation alone needs more than there is
        start = best.assignment.policy if best is not None else near  # what fits with more on the device is near
        assignment = fit(keeping, most, time_limit_s=time_limit_s, near=start, least=least)
        if assignment.fits(most):
            choice = _Choice(assignment, where, moving_s, keeping.base)
            best = choice if best is None or choice.time_s <= _FASTER * best.time_s else best
        elif best is None:
            again = _refusal(keeping, assignment.outcome, budget_bytes or 0, reserved_bytes, margin)
            again.least_policy = dict(assignment.policy)
            refused = again if refused is None or _least(again) < _least(refused) else refused
    if best is None:
        assert refused is not None and refused.least_policy is not None
        _LEAST[network] = refused.least_policy
        while len(_LEAST) > _REMEMBERED:
            _LEAST.pop(next(iter(_LEAST)))
        raise refused
    keeping.base = best.base
    return MemoryPlan(keeping, best.assignment, budget_bytes, reserved, best.where, best.moving_s, loss_bytes=at_turn)


@dataclass(frozen=True)
class _Choice:
    """A plan that fits, with state at one place."""

    assignment: Assignment
    where: StatePolicy
    moving_s: float
    """What moving the state takes."""
    base: npt.NDArray[np.int64]

    @property
    def time_s(self) -> float:
        return self.assignment.outcome.time_s + self.moving_s


def _by_hand(keeping: StepModel, policy: Mapping[str, str | Policy]) -> Assignment:
    """The plan for policies that the user chose by hand."""
    policies = parse_policies(policy)
    return Assignment(policies, keeping.evaluate(policies))


def _least(refused: PlanError) -> int:
    assert refused.least_bytes is not None
    return refused.least_bytes


def _at_turn(keeping: StepModel, graph: Graph, loss_bytes: int) -> int:
    """What the loss adds to the last moment of forward: it comes when that operation's workspace is free again, and
    holds the gradients of the outputs too."""
    last = keeping.plain.moments[keeping.turn - 1].bytes
    gradients = sum(graph.values[name].bytes for name in graph.outputs)
    return max(0, loss_bytes + gradients - (last.workspace - keeping.costs.library_bytes))


def _refusal(
    keeping: StepModel, least: StepUnderPolicies, budget_bytes: int, reserved_bytes: int, margin: float
) -> PlanError:
    """Why there is no plan, with the smallest budget that would do, its own margin in it."""
    floor, at = keeping.floor
    smallest, alone = (math.ceil((size + reserved_bytes) / (1 - margin)) for size in (least.peak_bytes, floor))
    refused = PlanError(
        f"a training step cannot be done within {format_bytes(budget_bytes)}: the smallest budget that was "
        f"found is {format_bytes(smallest)} (reached in {place(keeping, int(least.curve.argmax()))}; "
        f'{place(keeping, at)} alone needs {format_bytes(alone)}); give memory="'
        f'{rounded_up(smallest)}" or more, or a smaller batch'
    )
    refused.least_bytes = smallest
    return refused


def _savings(
    keeping: StepModel, where: StatePolicy, optimizer: OptimizerCost | float, offloadable: OffloadableParams | None
) -> StateSavings | None:
    """What a policy for state does to a step."""
    if where.idle:
        return None
    if keeping.tier is None:
        raise PlanError("state cannot leave the device: there is no tier below it in this plan")
    costs = keeping.costs
    cost = optimizer if isinstance(optimizer, OptimizerCost) else OptimizerCost.of(optimizer, costs.device_kind)
    offloadable = offloadable or OffloadableParams.of(keeping.graph, costs.parameters)
    seconds = sum(keeping.forward_s), sum(keeping.backward_s)
    return StateSavings.of(where, offloadable, keeping.plain, costs, cost, keeping.tier, seconds)


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
    return fastest_by_peak(found)


def fastest_by_peak(found: Iterable[Assignment]) -> list[Assignment]:
    """The assignments that no other beats in both time and peak, the largest peak first."""
    kept: list[Assignment] = []
    for one in sorted(found, key=lambda a: (a.outcome.peak_bytes, a.outcome.time_s)):
        if not kept or one.outcome.time_s < kept[-1].outcome.time_s:
            kept.append(one)
    return kept[::-1]
