"""Policies compiled for execution: for every call of a recording, which buffers begin, are released and are fetched
there.

This is the second level of a program (`outcore.program.script`) in the form in which it is executed: the places of
`Evict`, `Wait` and `Fetch` are tables by call; `Encode` happens after the last use in forward, `Decode` and `Recompute`
where a buffer is first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from outcore.cost.buffers import Buffer
from outcore.graph import Graph
from outcore.graph.record.recording import Recording, Ref, Step, schedule_drops
from outcore.graph.structure import leaves
from outcore.kernels.pool_window import PoolWindow
from outcore.memory.encode.bitmask_relu import bit_relus
from outcore.memory.encode.byte_index_pool import byte_pools
from outcore.memory.encode.pool_positions import pool_settings, window_of
from outcore.memory.op_fusion.banded_conv import in_bands
from outcore.memory.op_fusion.select import SelectedFusions
from outcore.memory.replay.replay_recompute import BufferRecompute, compile_recompute
from outcore.memory.saved_tensors.policy_table import BufferPlan, CallPlan, CallPlans
from outcore.memory.saved_tensors.recompute_batch_norm import BatchNormCall, BatchNormRecompute
from outcore.ops.registry import spatial_dims
from outcore.program.policies import KEEP, Policy, Recompute
from outcore.program.script import Script, ScriptLayout, layout_of


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """How a buffer is made again, and from what."""

    rerun: BufferRecompute
    sources: Mapping[str, str]
    """Value -> buffer it lies in, for what the recomputation reads."""
    inputs: tuple[str, ...]
    """Inputs of the model that the recomputation reads."""


@dataclass
class CompiledRecording:
    """A recording with its policies."""

    recording: Recording
    calls: Mapping[str, CallPlan]
    """Call -> what is to be done there."""
    positions: Mapping[str, int]
    """Call -> place in the order of execution."""
    released_late: Mapping[int, tuple[str, ...]]
    """Position -> buffers whose copy out must be over before its backward."""
    fetched: Mapping[int, tuple[str, ...]]
    """Position -> buffers that are prefetched before its backward."""
    again: Mapping[str, RecomputePlan]
    """Buffer -> how it is made again."""
    windows: Mapping[str, PoolWindow]
    """Buffer of indices -> the window of the pool that makes them."""
    dependents: Mapping[str, int]
    """Buffer -> how often others are made again from it."""
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
    def buffers(self) -> list[BufferPlan]:
        """Everything that has a policy, or that something is made again from."""
        return [plan for call in self.calls.values() for plan in (*call.born.values(), *call.derived.values())]

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.buffers and not self.instead

    @property
    def sized_by_data(self) -> bool:
        """Whether the host must read data to know the size of an encoded buffer."""
        return any(plan.policy.codec == "sparse" for plan in self.buffers)


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


class _Compiler(CallPlans):
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
        self.recording, self.model = recording, model
        self.steps = {s.name: s for s in recording.steps if s.kind != "guard"}
        self.types = {name: graph.blocks[call.block].type for name, call in graph.calls.items()}
        super().__init__(graph, buffers, layout)

    def first(self, value: str) -> str:
        """The buffer of a value."""
        return self.graph.values[value].alias_of or value

    def copied(self, buffer: Buffer, how: Policy) -> str:
        """Not asked for: a recording knows what a cast reads."""
        return ""

    def table(self, reassociated: bool, fused: SelectedFusions) -> CompiledRecording:
        """Everything by the call at which it happens."""
        bands = in_bands(self.graph, self.steps, self.model) if reassociated else {}
        self.steps |= bands
        again = {n: self.recomputed(self.buffers[n]) for n, how in self.planned.items() if isinstance(how, Recompute)}
        windows = {n: self.window(self.buffers[n]) for n, how in self.planned.items() if how.codec == "window"}
        reads: dict[str, list[str]] = {}  # buffer -> values in it that recomputations read
        for plan in again.values():
            for value, source in plan.sources.items():
                reads.setdefault(source, []).append(value)
        for source in reads:
            if source not in self.planned:
                self.planned[source] = KEEP
                self.add(self.buffers[source], KEEP)
        reruns = [plan.rerun for plan in again.values()]
        random = frozenset(name for rerun in reruns for name in rerun.random)
        given = {v: self.first(v) for plan in again.values() for v in plan.inputs}
        views = {v: base for v, base in given.items() if v != base}
        noted = frozenset({*(v for names in reads.values() for v in names), *views})
        makers = {maker for v in noted if (maker := self.graph.values[v].producer) is not None}
        instead, merged = self.replaced(bands, fused, windows)
        return CompiledRecording(
            recording=self.recording,
            calls=self.calls,
            positions=self.positions,
            released_late=self.released_late,
            fetched=self.fetched,
            again=again,
            windows={name: window for name, window in windows.items() if window is not None},
            dependents={source: len(names) for source, names in reads.items()},
            noted=noted,
            random=random,
            busy=frozenset({*self.busy(fused), *random, *makers}),
            inputs=frozenset(given.values()),
            views=views,
            norms={rerun.norm.call: rerun.norm for rerun in reruns if rerun.norm is not None},
            renorm=BatchNormRecompute(reassociated),
            instead=instead,
            ahead=bool(merged or bands),
            offloaded_bytes=self.offloaded_bytes,
        )

    def recomputed(self, buffer: Buffer) -> RecomputePlan:
        """A buffer that is made again by its writers, or by a cast."""
        calls = self.graph.calls
        if buffer.copy_of:
            needed, rerun = {buffer.copy_of: None}, BufferRecompute.cast(buffer.copy_of, buffer.dtype)
        else:
            read = (v for w in buffer.writers for v in calls[w].inputs)
            needed = dict.fromkeys(v for v in read if self.first(v) != buffer.name)
            writers = [self.steps[w] for w in buffer.writers]
            rerun = compile_recompute(writers, buffer.name, self.model, self.types, self.trained)
        sources = {v: self.first(v) for v in needed if self.buffers[self.first(v)].born >= 0}
        inputs = tuple(v for v in needed if self.buffers[self.first(v)].born < 0)
        return RecomputePlan(rerun, sources, inputs)

    def trained(self, step: Step) -> tuple[str, ...]:
        """The values that a step reads and that require a gradient."""
        values = self.graph.values
        return tuple(v for v in self.graph.calls[step.name].inputs if values[v].requires_grad)

    def busy(self, fused: SelectedFusions) -> set[str]:
        """Calls that make, save or are followed by something that has a plan."""
        found = {
            name
            for name, plan in self.calls.items()
            if plan.born or plan.derived or plan.leaving or plan.counted or plan.released or plan.stops
            or plan.shape_only or plan.saves
        }  # fmt: skip
        saving = {name for name, plan in self.calls.items() if plan.saves or plan.shape_only}
        return found | {total for total, relu in fused.sums.items() if relu in saving}  # which saves what its ReLU did

    def window(self, buffer: Buffer) -> PoolWindow | None:
        """The window of the pool that made these indices."""
        call = buffer.name.rpartition("~")[0]
        step = self.steps[call]
        module = self.model.get_submodule(step.target) if step.kind == "module" else None
        image = self.graph.values[self.graph.calls[call].inputs[0]].shape
        return window_of(pool_settings(module, step.args, step.kwargs), image[-spatial_dims(self.types[call]) :])

    def replaced(
        self, bands: dict[str, Step], fused: SelectedFusions, windows: Mapping[str, PoolWindow | None]
    ) -> tuple[dict[str, Step], bool]:
        """Call -> the step that runs in its place; and whether a step does the work of several calls."""
        instead = bit_relus(self.graph, self.steps, self.model, self.buffers, self.layout.policies)
        by_call = {name.rpartition("~")[0]: window for name, window in windows.items()}
        instead |= byte_pools(self.steps, self.model, by_call) | bands
        merged = fused.instead(self.graph, self.model, instead, set(self.planned))
        return instead | merged, bool(merged)
