"""Any model within a memory budget, on one device.

    model = outcore.within(model, (images,), memory="8GiB")     # the training loop stays as it is

The same object comes back. Its own forward runs as ever, and every piece of memory that backward needs has a policy:
kept, made again, sent to the host (from a CPU: to the disk) and fetched in time, or held in a smaller form. Which is
decided from the costs of the model's own calls, so that the predicted peak is within the budget and the step is as fast
as it can be. Gradients, losses and buffers are those of plain training, bit for bit.

Where no policy is enough, and for images that are read lazily, the early part of the network runs tile by tile
(`outcore.stream.managed_forward`): the same loop, the same gradients up to the order of sums, and the plan says so.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, get_args

import torch
from torch import nn

from outcore.compiled.auto import faster_of
from outcore.compiled.install import compile_within, is_compiled
from outcore.cost.cost_cache import measured
from outcore.cost.costs import Costs
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.loss_memory import loss_bytes_of
from outcore.cost.predicted.rough import without_gaps
from outcore.errors import OutcoreError, PlanError
from outcore.graph import Graph, capture
from outcore.graph.record.capture import arguments_as_called
from outcore.graph.record.recorder import planning
from outcore.graph.structure import leaves
from outcore.machine.units import format_bytes, parse_bytes
from outcore.memory.chunked_loss.dry_run import loss_by_rows
from outcore.memory.cuda_graphs.choose import GraphChoice
from outcore.memory.cuda_graphs.pool import grow_segments_from_now_on
from outcore.memory.cuda_graphs.step_graph import StepGraph
from outcore.memory.op_fusion.channels_last import FormatTrial, faster, other_order
from outcore.memory.param_offload.bucketed_step import can_be_parted, in_parts
from outcore.memory.param_offload.buckets import offloadable_of, uses_of
from outcore.memory.param_offload.escalation import StatePlacement
from outcore.memory.saved_tensors.lossy_error import effect_on_gradients
from outcore.memory.saved_tensors.managed_forward import ManagedForward, Settings
from outcore.memory.saved_tensors.trial_steps import run_trial_steps
from outcore.plan_document import Plan
from outcore.planner.memory.memory_format import CHANNELS_LAST, MemoryFormat
from outcore.planner.memory.plan import MemoryPlan, plan_memory
from outcore.planner.memory.state_policy import StatePolicy, ladder
from outcore.policies import parse_policies

if TYPE_CHECKING:
    from outcore.compiled.plan import CompiledPlan
    from outcore.stream.execute.pixel_loss import PixelLoss
    from outcore.stream.managed_forward import StreamedForward
    from outcore.stream.plan.step_document import StreamedStep

__all__ = ["memory_plan", "release", "within"]

Exactness = Literal["bitwise", "reassociated"]
_MARGIN = {"cuda": 0.02, "cpu": 0.0}
"""Share of the budget that is left free for what predictions miss."""
_ROUNDING_BYTES = {"cuda": 4 * 2**20}
"""Blocks that are less than a MiB too large are not split."""
_RECORDING = 0.04
"""Share of the budget that is left free where graphs are tried while the model trains."""
_GRAPHS_MARGIN = 0.01
"""With CUDA graphs: what they take is known before the first step, and corrects the plan."""


def within(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory: str | int | None,
    loss: Callable[[Any], torch.Tensor] | PixelLoss | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | float | None = None,
    plan: Plan | Mapping[str, str] | None = None,
    costs: Costs | None = None,
    measure_s: float = 2.5,
    graphs: bool | Literal["auto"] = "auto",
    exact: Exactness = "bitwise",
    state: StatePolicy | Mapping[str, Any] | None = None,
    stream: bool | None = None,
    statistics: bool = False,
    compile: bool | Literal["auto"] = False,
    quiet: bool = False,
) -> nn.Module:
    """Make a model train within a memory budget; returns the same model.

    >>> import torch, outcore
    >>> net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(16)))
    >>> images = torch.randn(4096, 64)
    >>> plain = outcore.memory_plan(outcore.within(net, (images,), memory=None, quiet=True)).plain_bytes
    >>> net = outcore.within(net, (images,), memory=int(0.7 * plain), quiet=True)
    >>> net(images).sum().backward()
    >>> outcore.memory_plan(net).peak_bytes <= 0.7 * plain
    True

    Args:
        model: any module, in the mode it will be trained in; nothing in it is changed but what ``forward`` runs.
        args: the positional arguments of a call, or their shapes. On a GPU with a budget, a few steps are taken with
            them before this returns, and the model put back (`outcore.memory.saved_tensors.trial_steps`).
        kwargs: the keyword arguments.
        memory: the most a training step may hold ("8GiB", bytes, or "50%" of what plain training is predicted to
            take), with weights, gradients and optimizer state in it, on a GPU as far as a plan is found all that
            is reserved (else a warning says what is), on a CPU the bytes of living tensors; None for the fastest step
            whatever it holds.
        loss: a function of the model's output, so that its memory is counted too; without it nothing is. An
            `outcore.stream.PixelLoss` is taken in one pass over the tiles, by `outcore.stream.pixel_loss`.
        optimizer: the optimizer, or how it is made, or the size of its state over that of the parameters; without it
            Adam's is assumed.
        plan: policies chosen by hand, or a plan that was made before.
        costs: of the model's calls, from `outcore.measure`; without them they are measured now.
        measure_s: how long measuring may take.
        graphs: run forward and backward as CUDA graphs: for small steps, which the interpreter cannot feed fast enough.
            Their memory stays reserved between steps, all of it within the budget. "auto": under a budget on a GPU,
            where the first steps show that the loop allows it and that it is faster
            (`outcore.memory.cuda_graphs.choose`).
        exact: "bitwise" for the numbers of plain training bit for bit; "reassociated" also allows kernels that round in
            another order: fused norms, and on a GPU images with their channels last inside the network, each where
            that is faster, convolutions of more than 2^31 numbers in bands of rows, and the last layer with its loss in
            chunks of rows (`outcore.memory.chunked_loss`), where that fits or is faster.
        state: where parameters, gradients and optimizer state live ("keep" or "offload" each), and when parameters are
            updated (`outcore.planner.memory.state_policy.StatePolicy`); needs the optimizer itself. Without it they
            leave the device if the optimizer was given and nothing else meets the budget, or only slower.
        stream: whether images are streamed in tiles, whose sums come in another order than plain training's; without
            it, if nothing else meets the budget or an image is read lazily (`outcore.data`).
        statistics: accept further passes over the image for norms over the whole of it, when it is streamed.
        compile: forward and backward are torch.compile's kernels, and what is saved between them is chosen under the
            budget (`outcore.compiled`). Compiling takes as long as ever. A model that cannot be compiled is managed as
            without, and a line says so. "auto": whichever trains faster, seen in a few steps of each
            (`outcore.compiled.auto`).
        quiet: do not say what was chosen.

    Raises:
        PlanError: the budget is too small; names the smallest that works.
    """
    if compile == "auto":
        return faster_of(within, dict(locals()))
    from outcore.stream.managed_forward import (
        StreamSettings,
        bytes_on,
        has_lazy,
        install_streamed_forward,
        loss_on_output,
        without_memory,
    )

    release(model)
    _check(model, exact)
    if graphs not in (True, False, "auto"):
        raise OutcoreError(f'graphs is True, False or "auto", not {graphs!r}')
    by_itself, graphs = graphs == "auto", graphs is True
    inner = model.__dict__.get("forward")
    share, budget = _budget(memory)
    if state is None and isinstance(plan, Plan) and plan.state:
        state = plan.state
    if state is not None and not StatePolicy.of(state).idle:
        in_parts(optimizer)
    lazy = has_lazy((args, kwargs))
    reassociated = exact == "reassociated" or (isinstance(plan, Plan) and plan.exactness == "reassociated")
    with planning():
        graph = capture(model, *without_memory((args, kwargs))) if lazy else capture(model, args, kwargs)
    cost = OptimizerCost.of(2.0 if optimizer is None else optimizer, graph_device(graph).type)
    if compile and not (lazy or stream or plan is not None or state is not None):
        wanted_loss = loss_on_output(loss)
        beside = loss_bytes_of(graph, wanted_loss, graph_device(graph))
        found = compile_within(model, graph, args, kwargs, share or budget, cost, wanted_loss, beside, quiet=quiet)
        if found is not None:
            return _announced(model, found, found.budget_bytes, assumed=optimizer is None, quiet=quiet)
    open_ = reassociated and costs is None and not (lazy or stream)
    turned, order = _other_order(model, graph, args, kwargs, plan, asked=open_)
    if isinstance(plan, Plan):
        graph, turned = turned or graph, None
        plan.validate(graph)
    by_hand = plan.stream if isinstance(plan, Plan) else None
    on_output = loss_on_output(loss)
    loss_bytes = loss_bytes_of(graph, on_output, graph_device(graph))
    if costs is None:
        seconds = measure_s if turned is None else measure_s / 2
        costs = measured(graph, time_limit_s=seconds, between=reassociated)
    if share is not None:
        plain = plan_memory(graph, costs, budget_bytes=None, optimizer=cost, loss_bytes=loss_bytes, policy={})
        budget = int(share * plain.plain_bytes)
    beside = loss_bytes + bytes_on(graph_device(graph), (args, kwargs))
    wanted = StreamSettings(budget, cost, beside, statistics, by_hand, dense=loss is not on_output)
    if lazy or stream or by_hand is not None:
        step = install_streamed_forward(model, graph, wanted, without_gaps(costs))
        return _announced(model, step, budget, assumed=optimizer is None, quiet=quiet)
    reserved, margin = 0, _MARGIN.get(costs.device_kind, 0.0)
    if graphs:
        margin = _GRAPHS_MARGIN
        reserved += StepGraph.copied_bytes([t for _, t in leaves((args, kwargs), torch.Tensor)])
    policy = parse_policies(plan.policy if isinstance(plan, Plan) else plan) if plan is not None else None
    movable = state is None and budget is not None and plan is None and can_be_parted(optimizer) and not graphs
    states: tuple[StatePolicy, ...] = (StatePolicy.of(state),)
    offloadable = None
    if movable or not states[0].idle:
        offloadable = offloadable_of(model, uses_of(model, _calls(graph)))
        states = ladder({item.name: item.bytes for item in offloadable.items}) if movable else states
    settings = Settings(
        budget,
        cost,
        reserved,
        policy,
        graphs=graphs,
        states=states,
        offloadable=offloadable,
        reassociated=reassociated,
        order=order,
        quiet=quiet,
        beside_bytes=loss_bytes,
        loss_by_rows=on_output is not None and loss_by_rows(graph, on_output),
        margin=margin,
        rounding_bytes=_ROUNDING_BYTES.get(costs.device_kind, 0) if not graphs else 0,
    )
    way = FormatTrial(graph, without_gaps(costs), settings)
    call = arguments_as_called(model, args, kwargs)
    try:
        if turned is not None:
            turned_costs = without_gaps(measured(turned, time_limit_s=measure_s / 2))
            way = faster(way, turned, turned_costs, model, graph_device(graph))
        if budget is not None and graph_device(graph).type == "cuda":
            grow_segments_from_now_on()
        managed_forward = ManagedForward(model, way.settings, way.costs, inner)
        key = managed_forward.key(*call)
        managed_forward.admit(key, *call, graph=way.graph, found=way.found)
        run_trial_steps(managed_forward, key, *call, on_output, way.graph)
    except PlanError as refused:
        if stream is False or plan is not None or state is not None:
            raise
        step = install_streamed_forward(model, graph, wanted, without_gaps(costs), refused)
        return _announced(model, step, budget, assumed=optimizer is None, quiet=quiet)
    if not any(managed_forward.admitted.values()):
        raise OutcoreError(
            "nothing that this model returns leads back to a parameter that requires a gradient; unfreeze some of them"
        )
    effect = effect_on_gradients(managed_forward, way.graph, *call, loss=on_output)
    if effect is not None and not quiet:
        print(f"outcore: {effect}", file=sys.stderr)
    _keep_state(managed_forward, way.graph, optimizer)
    if by_itself and plan is None:
        _choose_graphs(managed_forward, call)
    model.__dict__["forward"] = managed_forward
    return _announced(model, managed_forward.plan, budget, assumed=optimizer is None, quiet=quiet)


def _check(model: nn.Module, exact: str) -> None:
    """Refuse what cannot be managed."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise OutcoreError("give outcore.within the model, then wrap the result: DDP(outcore.within(model, ...))")
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise OutcoreError("this model is sharded already; call outcore.within before fully_shard")
    if exact not in get_args(Exactness):
        raise OutcoreError(f"exact is {' or '.join(map(repr, get_args(Exactness)))}, not {exact!r}")


def _other_order(
    model: nn.Module, graph: Graph, args: Any, kwargs: Mapping[str, Any] | None, plan: Any, *, asked: bool
) -> tuple[Graph | None, MemoryFormat]:
    """The network with its channels last, where a plan says so or that is a choice; else why it is not, if it could."""
    named = isinstance(plan, Plan) and plan.memory_order == CHANNELS_LAST
    if not named and (plan is not None or not asked):
        return None, MemoryFormat()
    turned, order = other_order(model, graph, args, kwargs, None if named else graph_device(graph))
    if named and turned is None:
        raise PlanError(f"the plan has images with their channels last, but this network stays as it is: {order.why}")
    return turned, order


def _keep_state(managed_forward: ManagedForward, graph: Graph, optimizer: Any) -> None:
    """Where the plan says that state lives below the device, let it; and further down, should that be needed."""
    where, states = managed_forward.plan.state, managed_forward.settings.states
    if len(states) > 1 or not where.idle:
        managed_forward.placement = StatePlacement(weakref.ref(in_parts(optimizer)), tuple(_calls(graph)), where)
        managed_forward.settings = replace(managed_forward.settings, states=states[states.index(where) :])
        managed_forward.placement.start(managed_forward)


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


def _calls(graph: Graph) -> list[tuple[str, str, Sequence[str]]]:
    """Name, block and parameters of every call."""
    return [(name, call.block, call.parameters) for name, call in graph.calls.items()]


def release(model: nn.Module) -> nn.Module:
    """Undo `within`; returns the same model.

    >>> import torch, outcore
    >>> net = torch.nn.Linear(2, 2)
    >>> net = outcore.release(outcore.within(torch.nn.Sequential(net), [(1, 2)], memory=None, quiet=True))
    >>> "forward" in net.__dict__
    False
    """
    managed_forward = model.__dict__.get("forward")
    if isinstance(managed_forward, ManagedForward):
        del model.__dict__["forward"]
        if managed_forward.inner is not None:
            model.__dict__["forward"] = managed_forward.inner
        if managed_forward.keeper is not None:
            managed_forward.keeper.close()
            managed_forward.keeper = None
    elif _is_streamed(managed_forward):
        del model.__dict__["forward"]
        managed_forward.close()
    elif is_compiled(managed_forward):
        del model.__dict__["forward"]
        model.__dict__.update(managed_forward.before)
    return model


def memory_plan(model: nn.Module) -> MemoryPlan | StreamedStep | CompiledPlan:
    """What `within` has decided for a model: policies, tiles, or what compiled kernels save."""
    managed_forward = model.__dict__.get("forward")
    if is_compiled(managed_forward):
        assert managed_forward.plan is not None
        return managed_forward.plan
    if _is_streamed(managed_forward):
        assert managed_forward.step is not None
        return managed_forward.step
    if not isinstance(managed_forward, ManagedForward):
        raise OutcoreError("this model is not under outcore.within")
    return managed_forward.plan


def graph_device(graph: Graph) -> torch.device:
    """Where the model of a graph is."""
    first = next(iter((*graph.module.model.parameters(), *graph.module.model.buffers())), None)
    return first.device if first is not None else torch.device("cpu")


def _budget(memory: str | int | None) -> tuple[float | None, int | None]:
    """A budget as a share of what plain training takes, or in bytes."""
    if isinstance(memory, (float, bool)):
        raise OutcoreError(f'memory={memory} says neither bytes nor a share; write memory="8GiB" or memory="50%"')
    if isinstance(memory, str) and memory.strip().endswith("%"):
        try:
            share = float(memory.strip()[:-1]) / 100
        except ValueError:
            share = 0.0
        if not share > 0:
            raise OutcoreError(f'memory={memory!r} is no share of what plain training takes; write memory="50%"')
        return share, None
    return None, parse_bytes(memory) if isinstance(memory, str) else memory


def _is_streamed(forward: Any) -> TypeGuard[StreamedForward]:
    if "outcore.stream.managed_forward" not in sys.modules:  # so that importing this does not import that
        return False
    from outcore.stream.managed_forward import StreamedForward

    return isinstance(forward, StreamedForward)


def _announced(
    model: nn.Module, plan: MemoryPlan | StreamedStep | CompiledPlan, budget: int | None, *, assumed: bool, quiet: bool
) -> nn.Module:
    """The model, after saying what was chosen for it."""
    if quiet:
        return model
    lines = [f"outcore: {plan.explain()}"]
    if budget is not None:
        lines[0] = lines[0].replace("outcore: peak", f"outcore: within {format_bytes(budget)}: peak", 1)
    if assumed:
        lines.append("  optimizer state counted as Adam's (twice the parameters); pass optimizer= for another")
    print("\n".join(lines), file=sys.stderr)
    return model
