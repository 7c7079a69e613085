"""What is proposed for one way of calling a model: what is fused, and a policy for every piece of memory.

A model is called in several ways (a smaller last batch, another image size). What was chosen by hand is done or
refused, never replaced. What was planned for the first way is taken over by the next where it fits the budget there;
only then is there a new search.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import torch
from torch import nn

from outcore.cost.costs import Costs
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.machine.units import format_bytes
from outcore.memory.chunked_loss.dry_run import stays_lazy
from outcore.memory.offload.bandwidth import memory_rate, tier_below
from outcore.memory.op_fusion.profitability import step_s
from outcore.memory.op_fusion.select import SelectedFusions
from outcore.memory.saved_tensors.cudnn_search import plan_repeatable, warn_of_differing
from outcore.memory.saved_tensors.plan_cache import known_least, known_policy, remember_least, remember_plan
from outcore.memory.saved_tensors.settings import Settings
from outcore.planner.memory.chunked_region import find_region
from outcore.planner.memory.memory_format import MemoryFormat
from outcore.planner.memory.plan import MemoryPlan, plan_memory
from outcore.planner.memory.script import check_policy
from outcore.planner.memory.state_policy import StatePolicy
from outcore.program.policies import Policy


@dataclass(frozen=True)
class CallProposal:
    """A plan, with what it expects to be fused."""

    plan: MemoryPlan
    graph: Graph
    """The network as it runs then."""
    fused: SelectedFusions
    library_s: float
    """Predicted time of a step in which norms are the library's."""


def propose(
    graph: Graph,
    model: nn.Module,
    costs: Costs,
    settings: Settings,
    device: torch.device,
    first: MemoryPlan | None,
    *,
    inherited: bool = False,
    near: MemoryPlan | None = None,
) -> CallProposal:
    """Plan a way of calling a model.

    Args:
        graph: of that way.
        model: the user's.
        costs: of the graph.
        settings: what was asked for.
        device: where the model computes.
        first: the plan of another way, if there is one.
        inherited: whether policies chosen by hand were chosen for another model, of which this is a copy.
        near: the plan for a budget that was a little larger.

    Raises:
        PlanError: the budget is too small, or policies chosen by hand do not meet it.
    """
    try:
        whole = _proposed(graph, model, costs, settings, device, first, inherited=inherited, near=near)
    except PlanError as refused:
        try:
            found = in_chunks(graph, model, costs, settings, device, None)
        except PlanError as smaller:
            raise (smaller if settings.reassociated else _naming(refused, smaller.least_bytes)) from None
        if found is None:
            raise
        if not settings.reassociated:
            raise _naming(refused, found.plan.peak_bytes) from None
        return found
    if settings.reassociated and (whole.plan.policy or not whole.plan.state.idle):
        return in_chunks(graph, model, costs, settings, device, whole) or whole
    return whole


def in_chunks(
    graph: Graph,
    model: nn.Module,
    costs: Costs,
    settings: Settings,
    device: torch.device,
    whole: CallProposal | None,
) -> CallProposal | None:
    """The fastest proposal in which the last layer and its loss run in chunks; none if they cannot, or if `whole`, in
    which they do not, is as fast.

    Raises:
        PlanError: nothing else fits, and this does not either; names the smallest budget that does.
    """
    if settings.budget_bytes is None or settings.policy is not None or settings.graphs:
        return None
    region = find_region(graph, costs, loss_bytes=settings.beside_bytes, loss_after=settings.loss_by_rows)
    if region is None or not stays_lazy(region, graph, model):
        return None
    rate = memory_rate(device)
    beside = settings.beside_bytes if region.ends else 0
    alone = replace(settings, states=(StatePolicy(),), fuse=False, beside_bytes=beside)
    best, refused = whole, None
    for tried in region.candidates(rate):
        written, expected = tried.applied(graph, costs, rate)
        try:
            found = _proposed(written, model, expected, alone, device, None)
        except PlanError as error:
            if refused is None or (error.least_bytes or 0) < (refused.least_bytes or 0):
                refused = error
            continue
        plan = replace(found.plan, chunked=tried, order=_against_plain(found.plan.order, graph, costs, settings))
        if best is None or plan.slowdown < best.plan.slowdown:
            best = replace(found, plan=plan)
        if not plan.policy:  # more chunks would only take longer
            break
    if best is None and refused is not None:
        raise refused
    return best if best is not whole else None


def _naming(refused: PlanError, least_bytes: int | None) -> PlanError:
    """A refusal that says what the last layer in chunks would do."""
    if least_bytes is None or (refused.least_bytes is not None and least_bytes >= refused.least_bytes):
        return refused
    again = PlanError(f'{refused}; with exact="reassociated", {format_bytes(least_bytes)} would do')
    again.least_bytes, again.least_policy = refused.least_bytes, refused.least_policy
    return again


def _proposed(
    graph: Graph,
    model: nn.Module,
    costs: Costs,
    settings: Settings,
    device: torch.device,
    first: MemoryPlan | None,
    *,
    inherited: bool = False,
    near: MemoryPlan | None = None,
) -> CallProposal:
    """A proposal with every layer as it is."""

    def planned(network: Graph, rows: Costs) -> MemoryPlan:
        def with_costs(rows: Costs) -> MemoryPlan:
            return _plan(network, rows, settings, device, first, inherited=inherited, near=near)

        if settings.reassociated or settings.policy is not None:
            plan = with_costs(rows)
            if not settings.reassociated:
                warn_of_differing(plan, network, device)
            return plan
        return plan_repeatable(with_costs, network, rows, device)

    rate = memory_rate(device)
    fused = SelectedFusions()
    if settings.reassociated and settings.fuse:
        fused = SelectedFusions.worth_it(graph, model, costs, rate, device, issued=not settings.graphs)
        fused = fused.sparing(settings.policy or ())
    written, expected = fused.applied(graph, model, costs, rate)
    plan = planned(written, expected)
    if not plan.state.idle:
        before, fused = fused, fused.with_state_elsewhere()
        if fused.scales != before.scales:  # then it is another network
            written, expected = fused.applied(graph, model, costs, rate)
            plan = planned(written, expected)
    order = settings.order if first is None else replace(settings.order, plain_s=None, plain_bytes=None)
    if written is not graph and order.plain_s is None:  # a plan is held against training as the user wrote it
        order = _against_plain(order, graph, costs, settings)
    plan = replace(plan, reassociated=settings.reassociated, order=order)
    return CallProposal(plan, written, fused, step_s(costs) + plan.outcome.extra_s)


def _plan(
    graph: Graph,
    costs: Costs,
    settings: Settings,
    device: torch.device,
    first: MemoryPlan | None,
    *,
    inherited: bool = False,
    near: MemoryPlan | None = None,
) -> MemoryPlan:
    """Policies for a graph: those there are, if they fit it, else new ones."""
    budget, by_hand = settings.budget_bytes, _by_memory(settings.policy, graph)

    def planned(policy: dict[str, Policy] | None, states: tuple[StatePolicy, ...] = settings.states) -> MemoryPlan:
        return plan_memory(
            graph,
            costs,
            budget_bytes=budget,
            optimizer=settings.optimizer,
            tier=tier_below(device, costs.total().saved_bytes, spills=not settings.graphs),
            memory_bytes_per_s=memory_rate(device),
            reserved_bytes=settings.reserved_bytes,
            margin=settings.margin,
            rounding_bytes=settings.rounding_bytes,
            loss_bytes=settings.beside_bytes,
            policy=policy,
            time_limit_s=settings.search_s,
            states=states,
            offloadable=settings.offloadable,
            draws=not settings.graphs,
            standing=settings.graphs,
            near=near.assignment.policy if near is not None else None,
            least=known_least(costs, draws=not settings.graphs) if policy is None and budget is not None else None,
        )

    def searched() -> MemoryPlan:
        if budget is None:
            return planned(None)
        if (found := known_policy(costs, settings)) is not None:
            with contextlib.suppress(PlanError):
                same = planned(found[0], (found[1],))
                if same.peak_bytes <= budget and not _unfit(same):
                    return same
        try:
            plan = planned(None)
        except PlanError as refused:
            if refused.least_policy is not None:
                remember_least(costs, refused.least_policy, draws=not settings.graphs)
            raise
        remember_plan(costs, settings, plan)
        return plan

    if first is None and (by_hand is None or not inherited):
        return planned(by_hand) if by_hand is not None else searched()
    known = by_hand if by_hand is not None or first is None else dict(first.assignment.policy)
    assert known is not None
    with contextlib.suppress(PlanError):
        same = planned(_applicable(known, graph))
        if unfit := _unfit(same):
            same = planned({name: how for name, how in _applicable(known, graph).items() if name not in unfit})
        if by_hand is not None or budget is None or same.peak_bytes <= budget:
            return same
    return searched()


def _against_plain(order: MemoryFormat, graph: Graph, costs: Costs, settings: Settings) -> MemoryFormat:
    """A memory format that also says what time and peak plain training has."""
    beside = settings.beside_bytes
    plain = plan_memory(graph, costs, budget_bytes=None, optimizer=settings.optimizer, loss_bytes=beside, policy={})
    return replace(order, plain_s=plain.keeping.plain_s, plain_bytes=plain.plain_bytes)


def _by_memory(policy: dict[str, Policy] | None, graph: Graph) -> dict[str, Policy] | None:
    """Policies by the first value in each memory: which one that is depends on what is fused."""
    if policy is None:
        return None
    values = graph.values
    return {(values[name].alias_of if name in values else None) or name: how for name, how in policy.items()}


def _applicable(policy: dict[str, Policy], graph: Graph) -> dict[str, Policy]:
    """The policies of values that the graph has too."""
    return {name: how for name, how in policy.items() if name.partition("~")[0] in {*graph.values, *graph.calls}}


def _unfit(plan: MemoryPlan) -> set[str]:
    """The values that cannot have their policies in this graph: a layer that had no hooks has some now."""
    found, buffers = set(), plan.keeping.buffers
    for name, how in plan.policy.items():
        try:
            check_policy(buffers[name], how)
        except PlanError:
            found.add(name)
    return found
