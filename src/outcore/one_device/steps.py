"""The steps of `outcore.within`: record the model, measure it, then compile, stream or manage it.

    Request ──record──▶ Network ──measure_costs──▶ Network with costs ─┬─manage──▶ a forward by a plan ──install
                           └─compile_model                             └─stream_tiles, if nothing else meets the budget

A `Request` is what the caller asked for and does not change; a `Network` is what is known of the model, more with every
step. The model itself is touched by the last step alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from outcore.compiled.install import compile_within
from outcore.cost.cost_cache import measured
from outcore.cost.costs import Costs
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.loss_memory import loss_bytes_of, output_of
from outcore.cost.predicted.rough import without_gaps
from outcore.errors import OutcoreError, PlanError, VaryingError
from outcore.graph import Graph, capture
from outcore.graph.record.capture import arguments_as_called
from outcore.graph.record.recorder import planning
from outcore.graph.structure import has_lazy_images, leaves
from outcore.machine.units import format_bytes
from outcore.memory.chunked_loss.dry_run import loss_by_rows
from outcore.memory.cuda_graphs.choose import GraphChoice
from outcore.memory.cuda_graphs.pool import grow_segments_from_now_on
from outcore.memory.cuda_graphs.step_graph import StepGraph
from outcore.memory.op_fusion.channels_last import FormatTrial, faster, other_order
from outcore.memory.param_offload.bucketed_step import in_parts
from outcore.memory.param_offload.buckets import calls_of, offloadable_of, uses_of
from outcore.memory.param_offload.escalation import StatePlacement
from outcore.memory.param_offload.separable import separable_step
from outcore.memory.saved_tensors.lossy_error import effect_on_gradients
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.memory.saved_tensors.settings import Settings
from outcore.memory.saved_tensors.trial_steps import run_trial_steps
from outcore.planner.memory.memory_format import CHANNELS_LAST, MemoryFormat
from outcore.planner.memory.plan import MemoryPlan, plan_memory
from outcore.planner.memory.state_policy import StatePolicy, ladder
from outcore.program.plan.document import Plan
from outcore.program.policies import parse_policies

if TYPE_CHECKING:
    from outcore.compiled.plan import CompiledPlan
    from outcore.stream.execute.pixel_loss import PixelLoss
    from outcore.stream.plan.step_document import StreamedStep

Exactness = Literal["bitwise", "reassociated"]
_MARGIN = {"cuda": 0.02, "cpu": 0.0}
"""Share of the budget that is left free for what predictions miss."""
_ROUNDING_BYTES = {"cuda": 4 * 2**20}
"""Blocks that are less than a MiB too large are not split."""
_RECORDING = 0.04
"""Share of the budget that is left free where graphs are tried while the model trains."""
_GRAPHS_MARGIN = 0.01
"""With CUDA graphs: what they take is known before the first step, and corrects the plan."""


@dataclass(frozen=True)
class Request:
    """What the caller of `within` asked for."""

    model: nn.Module
    args: Any
    kwargs: Mapping[str, Any] | None
    share: float | None
    budget: int | None
    loss: Callable[[Any], torch.Tensor] | PixelLoss | None
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | float | None
    plan: Plan | Mapping[str, str] | None
    measure_s: float
    graphs: bool | Literal["auto"]
    exact: Exactness
    state: StatePolicy | Mapping[str, Any] | None
    stream: bool | None
    statistics: bool
    quiet: bool

    @property
    def as_graphs(self) -> bool:
        """Whether steps are CUDA graphs from the start."""
        return self.graphs is True

    @property
    def reassociated(self) -> bool:
        """Whether sums may come in another order."""
        return self.exact == "reassociated" or (isinstance(self.plan, Plan) and self.plan.exactness == "reassociated")


@dataclass(frozen=True)
class Network:
    """What is known of the model, more with every step."""

    graph: Graph
    cost: OptimizerCost
    on_output: Callable[[Any], torch.Tensor] | None
    """The loss; None for one over pixels, which is taken tile by tile."""
    lazy: bool
    """Whether an image is read piece by piece."""
    inner: Any
    """A forward that the user has put on the model."""
    held_bytes: int = 0
    """What the loop holds throughout beside the model, where a loss says so: the targets of a Keras model's ``fit``."""
    loss_bytes: int = 0
    costs: Costs | None = None
    budget: int | None = None
    turned: Graph | None = None
    """The network with its channels last, where that is a choice."""
    order: MemoryFormat = field(default_factory=MemoryFormat)
    tiles: Mapping[str, Any] | None = None
    """Tiles that a plan was given with."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.graph.device

    @property
    def known_costs(self) -> Costs:
        """The costs, once they were measured."""
        assert self.costs is not None
        return self.costs


def record(asked: Request) -> Network:
    """The model as a graph."""
    from outcore.stream.execute.pixel_loss import PixelLoss
    from outcore.stream.managed_forward import without_memory

    call = (asked.args, asked.kwargs)
    lazy = has_lazy_images(call)
    with planning():
        graph = capture(asked.model, *without_memory(call)) if lazy else capture(asked.model, *call)
    cost = OptimizerCost.of(2.0 if asked.optimizer is None else asked.optimizer, graph.device.type)
    held = getattr(asked.loss, "bytes_of_targets", None)
    beside = held(output_of(graph)) if held is not None and graph.executable is not None else 0
    on_output = None if isinstance(asked.loss, PixelLoss) else asked.loss
    return Network(graph, cost, on_output, lazy, asked.model.__dict__.get("forward"), beside)


def compile_model(asked: Request, network: Network) -> nn.Module | None:
    """The model with torch.compile's kernels; None if it cannot be compiled."""
    beside = loss_bytes_of(network.graph, network.on_output, network.device) + network.held_bytes
    call, budget = (asked.model, network.graph, asked.args, asked.kwargs), asked.share or asked.budget
    cost, loss = network.cost, network.on_output
    found = compile_within(*call, budget, cost, loss, beside, graphs=asked.as_graphs, quiet=asked.quiet)
    return _announced(asked, found, found.budget_bytes) if found is not None else None


def measure_costs(asked: Request, network: Network, costs: Costs | None) -> Network:
    """The network with a cost for every call, in the memory format of the plan or in both; and the budget in bytes."""
    plan, graph = asked.plan, network.graph
    open_ = asked.reassociated and costs is None and not (network.lazy or asked.stream)
    turned, order = _other_order(asked.model, graph, asked.args, asked.kwargs, plan, asked=open_)
    if isinstance(plan, Plan):
        graph, turned = turned or graph, None
        plan.validate(graph)
    beside = loss_bytes_of(graph, network.on_output, network.device)
    if costs is None:
        seconds = asked.measure_s if turned is None else asked.measure_s / 2
        costs = measured(graph, time_limit_s=seconds, between=asked.reassociated)
    costs = without_gaps(costs)
    budget = asked.budget
    if asked.share is not None:
        known: dict[str, Any] = {"optimizer": network.cost, "loss_bytes": beside, "reserved_bytes": network.held_bytes}
        plain = plan_memory(graph, costs, budget_bytes=None, policy={}, **known)
        budget = int(asked.share * plain.plain_bytes)
    tiles = plan.stream if isinstance(plan, Plan) else None
    found = replace(network, graph=graph, costs=costs, loss_bytes=beside, budget=budget)
    return replace(found, turned=turned, order=order, tiles=tiles)


def stream_tiles(asked: Request, network: Network, refused: PlanError | None = None) -> nn.Module:
    """The model with its early part run tile by tile."""
    from outcore.stream.managed_forward import StreamSettings, bytes_on, install_streamed_forward

    _refuse_written_tensors(network.graph, refused)
    beside, images = network.loss_bytes + network.held_bytes, bytes_on(network.device, (asked.args, asked.kwargs))
    options: dict[str, Any] = {"dense": asked.loss is not network.on_output, "image_bytes": images}
    wanted = StreamSettings(network.budget, network.cost, beside, asked.statistics, network.tiles, **options)
    step = install_streamed_forward(asked.model, network.graph, wanted, network.known_costs, refused)
    return _announced(asked, step, network.budget)


def _refuse_written_tensors(graph: Graph, refused: PlanError | None) -> None:
    """Raise where forward leaves a tensor with the model, which tiles would not bring back: now, not in every step."""
    effects = graph.executable[1].effects if graph.executable is not None else None
    if effects is None:
        return
    try:
        effects.refuse_tensors("a streamed model")
    except VaryingError as error:
        if refused is None:
            raise
        again = PlanError(f"{refused}; tiles do not help: {error}")
        again.least_bytes, again.least_policy = refused.least_bytes, refused.least_policy
        raise again from None


def _settings(asked: Request, network: Network) -> Settings:
    """What the planner of one device is asked."""
    plan, state, graphs, kind = asked.plan, asked.state, asked.as_graphs, network.known_costs.device_kind
    copied = StepGraph.copied_bytes([t for _, t in leaves((asked.args, asked.kwargs), torch.Tensor)]) if graphs else 0
    free = state is None and network.budget is not None and plan is None
    movable = free and isinstance(asked.optimizer, torch.optim.Optimizer) and _state_stays(asked) is None and not graphs
    states: tuple[StatePolicy, ...] = (StatePolicy.of(state),)
    offloadable = None
    if movable or not states[0].idle:
        offloadable = offloadable_of(asked.model, uses_of(asked.model, calls_of(network.graph)))
        states = ladder({item.name: item.bytes for item in offloadable.items}) if movable else states
    return Settings(
        network.budget,
        network.cost,
        copied + network.held_bytes,
        parse_policies(plan.policy if isinstance(plan, Plan) else plan) if plan is not None else None,
        graphs=graphs,
        states=states,
        offloadable=offloadable,
        reassociated=asked.reassociated,
        order=network.order,
        quiet=asked.quiet,
        beside_bytes=network.loss_bytes,
        loss_by_rows=network.on_output is not None and loss_by_rows(network.graph, network.on_output),
        margin=_GRAPHS_MARGIN if graphs else _MARGIN.get(kind, 0.0),
        rounding_bytes=_ROUNDING_BYTES.get(kind, 0) if not graphs else 0,
    )


def manage(asked: Request, network: Network) -> tuple[ManagedForward, FormatTrial]:
    """A forward that follows a plan, tried for a few steps; and the memory format that was chosen.

    Raises:
        PlanError: nothing meets the budget.
    """
    try:
        return _managed(asked, network)
    except PlanError as refused:
        if (why := _state_stays(asked)) is not None:
            refused.args = (f"{refused}; the optimizer's state stays on the device: {why}",)
        raise


def _state_stays(asked: Request) -> str | None:
    """Why the state of the optimizer that was given cannot leave the device."""
    return separable_step(asked.optimizer).why_not if isinstance(asked.optimizer, torch.optim.Optimizer) else None


def _managed(asked: Request, network: Network) -> tuple[ManagedForward, FormatTrial]:
    way = FormatTrial(network.graph, network.known_costs, _settings(asked, network))
    call = arguments_as_called(asked.model, asked.args, asked.kwargs)
    if network.turned is not None:
        costs = without_gaps(measured(network.turned, time_limit_s=asked.measure_s / 2))
        way = faster(way, network.turned, costs, asked.model, network.device)
    if network.budget is not None and network.device.type == "cuda":
        grow_segments_from_now_on()
    managed_forward = ManagedForward(asked.model, way.settings, way.costs, network.inner)
    key = managed_forward.key(*call)
    managed_forward.admit(key, *call, graph=way.graph, found=way.found)
    run_trial_steps(managed_forward, key, *call, network.on_output, way.graph, asked.optimizer)
    return managed_forward, way


def install(asked: Request, network: Network, managed_forward: ManagedForward, way: FormatTrial) -> nn.Module:
    """The model with that forward in place of its own."""
    if not any(managed_forward.admitted.values()):
        raise OutcoreError(
            "nothing that this model returns leads back to a parameter that requires a gradient; unfreeze some of them"
        )
    call = arguments_as_called(asked.model, asked.args, asked.kwargs)
    effect = effect_on_gradients(managed_forward, way.graph, *call, loss=network.on_output)
    if effect is not None and not asked.quiet:
        print(f"outcore: {effect}", file=sys.stderr)
    _keep_state(managed_forward, way.graph, asked.optimizer)
    if asked.graphs == "auto" and asked.plan is None:
        _choose_graphs(managed_forward, call)
    asked.model.__dict__["forward"] = managed_forward
    return _announced(asked, managed_forward.plan, network.budget)


def _other_order(
    model: nn.Module, graph: Graph, args: Any, kwargs: Mapping[str, Any] | None, plan: Any, *, asked: bool
) -> tuple[Graph | None, MemoryFormat]:
    """The network with its channels last, where a plan says so or that is a choice; else why it is not, if it could."""
    named = isinstance(plan, Plan) and plan.memory_order == CHANNELS_LAST
    if not named and (plan is not None or not asked):
        return None, MemoryFormat()
    turned, order = other_order(model, graph, args, kwargs, None if named else graph.device)
    if named and turned is None:
        raise PlanError(f"the plan has images with their channels last, but this network stays as it is: {order.why}")
    return turned, order


def _keep_state(managed_forward: ManagedForward, graph: Graph, optimizer: Any) -> None:
    """Where the plan says that state lives below the device, let it; and further down, should that be needed."""
    where, states = managed_forward.plan.state, managed_forward.settings.states
    if len(states) > 1 or not where.idle:
        managed_forward.placement = StatePlacement(weakref.ref(in_parts(optimizer)), tuple(calls_of(graph)), where)
        managed_forward.settings = replace(managed_forward.settings, states=states[states.index(where) :])
        managed_forward.placement.start(managed_forward)
        managed_forward.give_back()  # what has left, so that training begins with what was tried


def _choose_graphs(managed_forward: ManagedForward, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """Let the first steps decide whether the next ones become CUDA graphs, where they could."""
    settings = managed_forward.settings
    entries = [entry for entry in managed_forward.admitted.values() if entry is not None]
    if managed_forward.device.type != "cuda" or settings.budget_bytes is None or settings.reassociated:
        return
    hooked = ("_backward_hooks", "_post_accumulate_grad_hooks")
    if any(getattr(p, name, None) for p in managed_forward.model.parameters() for name in hooked):
        return
    if any(entry.idle or entry.merged or not entry.plan.state.idle for entry in entries):
        return
    copied = StepGraph.copied_bytes([t for _, t in leaves(call, torch.Tensor)])
    as_graphs = replace(
        settings,
        graphs=True,
        # What the allocator was seen to need, and some more: before they are recorded, steps run beside.
        reserved_bytes=settings.reserved_bytes + copied + int(_RECORDING * settings.budget_bytes),
        states=(StatePolicy(),),
        offloadable=None,
    )
    reference = weakref.ref(managed_forward)

    def make(wanted: Settings) -> ManagedForward:
        here = reference()
        assert here is not None
        found = ManagedForward(here.model, wanted, here.costs, here.inner)
        found.only_graphs, found.near = True, here.plan
        return found

    managed_forward.choice = GraphChoice(as_graphs, make, copied)


def _announced(asked: Request, plan: MemoryPlan | StreamedStep | CompiledPlan, budget: int | None) -> nn.Module:
    """The model, after saying what was chosen for it."""
    if asked.quiet:
        return asked.model
    lines = [f"outcore: {plan.explain()}"]
    if budget is not None:
        lines[0] = lines[0].replace("outcore: peak", f"outcore: within {format_bytes(budget)}: peak", 1)
    if asked.optimizer is None:
        lines.append("  optimizer state counted as Adam's (twice the parameters); pass optimizer= for another")
    print("\n".join(lines), file=sys.stderr)
    return asked.model
