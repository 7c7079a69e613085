"""Policies compiled for execution: for every call of a recording, which buffers begin, are released and are fetched
there.

This is the second level of a program (`outcore.program.script`) in the form in which it is executed: the places of
`Evict`, `Wait` and `Fetch` are tables by call; `Encode` happens after the last use in forward, `Decode` and `Recompute`
where a buffer is first asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from outcore.cost.buffers import Buffer
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.graph.record.recording import Recording, Ref, Step, schedule_drops
from outcore.graph.structure import leaves
from outcore.kernels.pool_window import PoolWindow
from outcore.memory.encode.bitmask_relu import bit_relus
from outcore.memory.encode.byte_index_pool import byte_pools
from outcore.memory.encode.pool_positions import window_of
from outcore.memory.offload.arena import Arena
from outcore.memory.op_fusion.banded_conv import in_bands
from outcore.memory.op_fusion.select import SelectedFusions
from outcore.memory.replay.replay_recompute import BufferRecompute, compile_recompute
from outcore.memory.saved_tensors.recompute_batch_norm import BatchNormCall, BatchNormRecompute
from outcore.ops.recompute_encode import held_bytes
from outcore.program.policies import KEEP, Policy, Recompute
from outcore.program.script import Script, ScriptLayout, layout_of


@dataclass(frozen=True, slots=True)
class ReplayBufferPlan:
    """What is to be done with one buffer."""

    buffer: str
    policy: Policy
    dependents: int = 0
    """How often other buffers are recomputed from it."""
    rerun: BufferRecompute | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    """Value -> buffer it lies in, for what the recomputation reads."""
    inputs: tuple[str, ...] = ()
    """Inputs of the model that the recomputation reads."""
    window: PoolWindow | None = None
    bytes: int = 0


@dataclass
class CompiledRecording:
    """A recording with its policies."""

    recording: Recording
    positions: Mapping[str, int]
    """Call -> place in the order of execution."""
    births: Mapping[str, tuple[tuple[str, ReplayBufferPlan], ...]]
    """Call -> values that are first in a buffer with a policy."""
    derived: Mapping[str, Mapping[int, ReplayBufferPlan]]
    """Call -> place among the tensors that autograd saves -> what to do with it."""
    leaving: Mapping[str, tuple[str, ...]]
    """Call -> buffers whose last use in forward it is."""
    counted: Mapping[str, tuple[str, ...]]
    """Call -> buffers whose nonzeros are counted after it, because how small they become depends on the data."""
    released: Mapping[str, tuple[str, ...]]
    """Call -> buffers whose copy out must be over after its forward."""
    released_late: Mapping[int, tuple[str, ...]]
    """Position -> buffers whose copy out must be over before its backward."""
    fetched: Mapping[int, tuple[str, ...]]
    """Position -> buffers that are prefetched before its backward."""
    stops: frozenset[str]
    """Calls before whose backward something is released or fetched."""
    shape_only: Mapping[str, set[str]]
    """Call -> buffers of which its backward needs only the shape."""
    noted: frozenset[str]
    """Values whose layout must be known."""
    random: frozenset[str]
    """Calls whose generator states must be known."""
    inputs: frozenset[str]
    """Inputs of the model that are needed in backward."""
    views: Mapping[str, str]
    """Value -> input it is a view of, for what is needed of an input under another name."""
    busy: frozenset[str]
    """Calls for which there is something to do; the others run as they are."""
    norms: Mapping[str, BatchNormCall]
    """Call -> the batch norm it is, where that is recomputed."""
    renorm: BatchNormRecompute
    instead: Mapping[str, Step]
    """Call -> the step that replaces the recorded one."""
    ahead: bool = False
    """A call does the work of a later one, so the model's own code cannot run in between."""
    offloaded_bytes: int = 0
    like_source: dict[str, bool] = field(default_factory=dict)
    """Copy in another type -> whether it has the layout of a cast of its source; filled in by the first run."""
    geometry: dict[str, Any] = field(default_factory=dict)
    """Value -> its layout; filled in by the first run."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.births and not self.derived and not self.instead

    @property
    def sized_by_data(self) -> bool:
        """Whether the host must read data to know the size of an encoded buffer."""
        plans = [plan for born in self.births.values() for _, plan in born]
        plans += [plan for made in self.derived.values() for plan in made.values()]
        return any(plan.policy.codec == "sparse" for plan in plans)


def prepare(
    graph: Graph,
    recording: Recording,
    model: nn.Module,
    buffers: Mapping[str, Buffer],
    script: tuple[Script, Script],
    *,
    reassociated: bool = False,
    fused: SelectedFusions | None = None,
) -> CompiledRecording:
    """Compile policies for execution.

    Args:
        graph: the network.
        recording: how it runs.
        model: the user's model.
        buffers: of the graph.
        script: of the forward and the backward (`outcore.planner.memory.script`).
        reassociated: whether results may differ by rounding.
        fused: the fused operations.
    """
    return _Compiler(graph, recording, model, buffers, layout_of(*script)).table(
        reassociated, fused or SelectedFusions()
    )


class _Compiler:
    """Goes through the policies of a recording once."""

    def __init__(
        self,
        graph: Graph,
        recording: Recording,
        model: nn.Module,
        buffers: Mapping[str, Buffer],
        layout: ScriptLayout,
    ) -> None:
        schedule_drops(recording.steps, [ref.name for _, ref in leaves(recording.result, Ref)])
        recording.dropped = True
        self.graph, self.recording, self.model, self.buffers, self.layout = graph, recording, model, buffers, layout
        self.steps = recording.calls()
        self.order = list(graph.calls)
        self.types = {name: graph.blocks[call.block].type for name, call in graph.calls.items()}
        self.reads: dict[str, list[str]] = {}
        """Buffer -> values in it that recomputations read."""
        self.plans: dict[str, ReplayBufferPlan] = {}

    def table(self, reassociated: bool, fused: SelectedFusions) -> CompiledRecording:
        """Everything by the call at which it happens."""
        bands = in_bands(self.graph, self.steps, self.model) if reassociated else {}
        self.steps |= bands
        shape_only = self.plan_buffers()
        births, derived, leaving, counted = self.by_call()
        layout, order, plans = self.layout, self.order, self.plans
        position = {name: i for i, name in enumerate(order)}
        late = {position[call]: tuple(names) for call, names in layout.released_before.items()}
        fetched = {position[call]: tuple(names) for call, names in layout.fetched_before.items()}
        stops = frozenset(order[place] for place in (*late, *fetched))
        reruns = [p.rerun for p in plans.values() if p.rerun is not None]
        random = frozenset(name for rerun in reruns for name in rerun.random)
        given = {v: self.graph.values[v].base for p in plans.values() for v in p.inputs}
        views = {v: base for v, base in given.items() if v != base}
        noted = frozenset({*(v for names in self.reads.values() for v in names), *views})
        makers = {maker for v in noted if (maker := self.graph.values[v].producer) is not None}
        saving = self.saving(fused)
        instead, merged = self.replaced(bands, fused)
        happens = (births, derived, leaving, counted, layout.released_after, stops, shape_only, random, saving, makers)
        return CompiledRecording(
            recording=self.recording,
            positions=position,
            births={k: tuple(v) for k, v in births.items()},
            derived=derived,
            leaving={k: tuple(v) for k, v in leaving.items()},
            counted={k: tuple(v) for k, v in counted.items()},
            released={k: tuple(v) for k, v in layout.released_after.items()},
            released_late=late,
            fetched=fetched,
            stops=stops,
            shape_only=shape_only,
            noted=noted,
            random=random,
            busy=frozenset(call for calls in happens for call in calls),
            inputs=frozenset(given.values()),
            views=views,
            norms={rerun.norm.call: rerun.norm for rerun in reruns if rerun.norm is not None},
            renorm=BatchNormRecompute(reassociated),
            instead=instead,
            ahead=bool(merged or bands),
            offloaded_bytes=sum(room_below(self.buffers[n], p.policy) for n, p in plans.items() if p.policy.offloads),
        )

    def plan_buffers(self) -> dict[str, set[str]]:
        """Note what is to be done with every buffer; returns of which ones a call's backward needs only the shape."""
        for name, how in self.layout.policies.items():
            buffer = self.buffers.get(name)
            if buffer is None:
                raise PlanError(f"the plan names {name}, which is no memory of {self.graph.root.type}")
            if isinstance(how, Recompute):
                self.plans[name] = self.recomputed(buffer, how)
            else:
                window = _window(self.graph, self.steps, buffer, self.model) if how.codec == "window" else None
                self.plans[name] = ReplayBufferPlan(name, how, window=window)
        shape_only: dict[str, set[str]] = {}
        for buffer in self.buffers.values():
            for i in buffer.shapes if buffer.kind == "value" else ():
                shape_only.setdefault(self.order[i], set()).add(buffer.name)
                self.plans.setdefault(buffer.name, ReplayBufferPlan(buffer.name, KEEP))
        for source in self.reads:
            self.plans.setdefault(source, ReplayBufferPlan(source, KEEP))
        for name, plan in self.plans.items():
            dependents = len(self.reads.get(name, ()))
            self.plans[name] = replace(plan, dependents=dependents, bytes=self.buffers[name].bytes)
        return shape_only

    def recomputed(self, buffer: Buffer, how: Policy) -> ReplayBufferPlan:
        """A buffer that is made again by its writers, or by a cast."""
        calls = self.graph.calls
        if buffer.copy_of:
            needed, rerun = {buffer.copy_of: None}, BufferRecompute.cast(buffer.copy_of, buffer.dtype)
        else:
            read = (v for w in buffer.writers for v in calls[w].inputs)
            needed = dict.fromkeys(v for v in read if self.graph.values[v].base != buffer.name)
            writers = [self.steps[w] for w in buffer.writers]
            rerun = compile_recompute(writers, buffer.name, self.model, self.types, self.trained)
        sources = {v: self.graph.values[v].base for v in needed if self.buffers[self.graph.values[v].base].born >= 0}
        for value, source in sources.items():
            self.reads.setdefault(source, []).append(value)
        inputs = tuple(v for v in needed if self.buffers[self.graph.values[v].base].born < 0)
        return ReplayBufferPlan(buffer.name, how, 0, rerun, sources, inputs)

    def trained(self, step: Step) -> tuple[str, ...]:
        """The values that a step reads and that require a gradient."""
        values = self.graph.values
        return tuple(v for v in self.graph.calls[step.name].inputs if values[v].requires_grad)

    def by_call(
        self,
    ) -> tuple[
        dict[str, list[tuple[str, ReplayBufferPlan]]],
        dict[str, dict[int, ReplayBufferPlan]],
        dict[str, list[str]],
        dict[str, list[str]],
    ]:
        """Call -> buffers that begin there, that it derives, whose last use it is, and whose nonzeros are counted
        after it."""
        births: dict[str, list[tuple[str, ReplayBufferPlan]]] = {}
        derived: dict[str, dict[int, ReplayBufferPlan]] = {}
        leaving: dict[str, list[str]] = {}
        counted: dict[str, list[str]] = {}
        for name, plan in self.plans.items():
            buffer = self.buffers[name]
            call = self.order[buffer.born]
            if buffer.kind == "derived":
                derived.setdefault(call, {})[int(name.rpartition("~")[2])] = plan
                continue
            births.setdefault(call, []).append((name, plan))
            leaving.setdefault(self.layout.leaves_after.get(name, self.order[buffer.last]), []).append(name)
            if plan.policy.codec == "sparse" and buffer.done < buffer.last:
                counted.setdefault(self.order[buffer.done], []).append(name)
        return births, derived, leaving, counted

    def saving(self, fused: SelectedFusions) -> set[str]:
        """Calls whose backward keeps a buffer that has a plan."""
        places = (i for name in self.plans for i in (*self.buffers[name].savers, *self.buffers[name].shapes))
        found = {self.order[i] for i in places}
        return found | {total for total, relu in fused.sums.items() if relu in found}  # which saves what its ReLU did

    def replaced(self, bands: dict[str, Step], fused: SelectedFusions) -> tuple[dict[str, Step], bool]:
        """Call -> the step that runs in its place; and whether a step does the work of several calls."""
        windows = {n.rpartition("~")[0]: p.window for n, p in self.plans.items() if p.policy.codec == "window"}
        instead = bit_relus(self.graph, self.steps, self.model, self.buffers, self.layout.policies)
        instead |= byte_pools(self.steps, self.model, windows) | bands
        merged = fused.instead(self.graph, self.model, instead, set(self.plans))
        return instead | merged, bool(merged)


def room_below(buffer: Buffer, policy: Policy) -> int:
    """Bytes that a buffer takes where it goes: whole, or the two or three pieces of its smaller form."""
    if not policy.codec:
        return Arena.rounded(buffer.bytes)
    return Arena.rounded(held_bytes(buffer, policy.codec)[0]) + 2 * Arena.rounded(1)


def _window(graph: Graph, steps: Mapping[str, Step], buffer: Buffer, model: nn.Module) -> PoolWindow | None:
    """The window of the pool that made these indices."""
    call = buffer.name.rpartition("~")[0]
    step = steps[call]
    image = graph.values[graph.calls[call].inputs[0]].shape
    if step.kind == "module":
        module = model.get_submodule(step.target)
        settings = {n: getattr(module, n) for n in ("kernel_size", "stride", "padding", "dilation")}
    else:
        settings = dict(_POOL_SIGNATURE.bind(*step.args, **step.kwargs).arguments)
    dims = 3 if "3" in graph.blocks[graph.calls[call].block].type else 2
    return window_of(settings, image[-dims:])


def _pool(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> None:
    """The arguments of torch.nn.functional.max_pool2d."""


_POOL_SIGNATURE = inspect.signature(_pool)
