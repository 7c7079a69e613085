"""What a plan wants done at each call of a model, in the form in which a running forward looks it up.

A plan names calls by where they happen: ``layer1.0.bn1#0`` is the first call of that module, ``layer1.0.add()#1`` the
second addition in the forward of ``layer1.0``. A running forward counts in the same way, so it is aligned with the plan
call by call, whatever else it does in between; a call the plan does not know has no policy, and a planned call that
does not come is never missed by anybody.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from outcore.cost.buffers import Buffer
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.graph.naming import kind_of, paths
from outcore.graph.parts import BlockKind
from outcore.graph.record.recording import Ref
from outcore.graph.structure import leaves
from outcore.memory.replay.compile_policies import room_below
from outcore.memory.saved_tensors.recompute_batch_norm import NORMS, BatchNormRecompute
from outcore.planner.memory.chunked_region import ChunkedRegion
from outcore.program.policies import KEEP, Keep, Policy, Recompute
from outcore.program.script import Script, ScriptLayout, layout_of


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """What is to be done with one buffer."""

    name: str
    policy: Policy
    bytes: int
    copy_of: str = ""
    """For a copy in another type that an operation makes of an argument: the path of that argument."""


@dataclass(slots=True)
class CallPlan:
    """What is to be done at one call."""

    name: str
    type: str
    position: int
    """Place in the order of calls."""
    born: dict[str, BufferPlan] = field(default_factory=dict)
    """Path in the result -> the buffer that begins there."""
    derived: dict[int, BufferPlan] = field(default_factory=dict)
    """Place among the tensors that autograd keeps -> what to do with it."""
    leaving: list[str] = field(default_factory=list)
    """Buffers whose last use in forward this is."""
    counted: list[str] = field(default_factory=list)
    """Buffers whose numbers are counted after it, because how small they become is in the data."""
    released: list[str] = field(default_factory=list)
    """Buffers whose copy out must be over after its forward."""
    stops: bool = False
    """Something is released or fetched before its backward."""
    shape_only: set[str] = field(default_factory=set)
    """Buffers of which its backward needs only the shape."""
    saves: bool = False
    """Its backward keeps a buffer that has a policy."""
    records: bool = False
    """It writes a buffer that is made again."""
    signs: bool = False
    """It is a ReLU that keeps signs alone."""
    windows: bool = False
    """It is a max pool that keeps positions alone."""

    hooked: bool = False
    """What autograd keeps of it is looked at."""
    rows_per_chunk: int = 0
    """It is the last layer, whose result and loss are made in chunks of so many rows."""

    direct: bool = False
    """What autograd keeps of it are whole values, which belong to a cell as soon as they are saved."""
    ends: bool = False
    """Something leaves after it, or backward stops before it."""
    special: bool = False
    """It does not run as it is, or only after a look at its arguments: in chunks, or keeping signs or positions."""


class ModulePlans:
    """One module of the model, and the plans of the calls that happen in it."""

    __slots__ = ("calls", "functions", "kind", "module", "path", "seen", "type")

    def __init__(self, module: nn.Module, path: str, kind: BlockKind) -> None:
        self.module, self.path, self.kind = weakref.ref(module), path, kind
        self.type = type(module)
        self.calls: dict[int, CallPlan] = {}
        """How often the module was called before -> what to do; for modules that are one call."""
        self.functions: dict[str, dict[int, CallPlan]] = {}
        """Function that its forward calls -> how often it was called before -> what to do."""
        self.seen: dict[Any, Any] = {}
        """Function -> what a running forward knows of it here."""


@dataclass
class PolicyTable:
    """A plan, call by call."""

    root: ModulePlans
    nodes: dict[int, ModulePlans]
    """By module (id)."""
    calls: dict[str, CallPlan]
    length: int
    """Calls of the model in all."""
    released_late: Mapping[int, tuple[str, ...]]
    """Position -> buffers whose copy out must be over before its backward."""
    fetched: Mapping[int, tuple[str, ...]]
    """Position -> buffers that start to come back before its backward."""
    renorm: BatchNormRecompute
    offloaded_bytes: int = 0
    verified: dict[str, bool] = field(default_factory=dict)
    """Copy in another type -> whether it was seen to be that; filled in by the first run."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.calls


def compile_policies(
    graph: Graph,
    model: nn.Module,
    buffers: Mapping[str, Buffer],
    script: tuple[Script, Script],
    *,
    reassociated: bool = False,
    chunked: ChunkedRegion | None = None,
) -> PolicyTable:
    """Lay a plan out call by call.

    Args:
        graph: the network that the plan was made for.
        model: the user's model.
        buffers: of the graph.
        script: of the forward and the backward (`outcore.planner.memory.script`).
        reassociated: whether results may differ by rounding.
        chunked: the last layer and its loss, where they run in chunks.
    """
    compiler = _Compiler(graph, model, buffers, layout_of(*script))
    if chunked is not None:
        compiler.at(chunked.head).rows_per_chunk = chunked.rows_per_chunk
    return compiler.table(reassociated)


class _Compiler:
    """Goes through the policies once."""

    def __init__(
        self,
        graph: Graph,
        model: nn.Module,
        buffers: Mapping[str, Buffer],
        layout: ScriptLayout,
    ) -> None:
        self.graph, self.model, self.buffers = graph, model, buffers
        self.order = list(graph.calls)
        self.positions = {name: i for i, name in enumerate(self.order)}
        self.layout = layout
        self.calls: dict[str, CallPlan] = {}
        self.bytes = 0
        for name in layout.policies:
            if name not in buffers:
                raise PlanError(f"the plan names {name}, which is no memory of {graph.root.type}")
        planned = dict(layout.policies)
        for buffer in buffers.values():
            if buffer.kind == "value" and buffer.shapes:
                planned.setdefault(buffer.name, KEEP)
        for name, how in planned.items():
            if not isinstance(how, Keep) or buffers[name].shapes:  # what others are made from is held by them
                self.add(buffers[name], how)
        self.copies()

    def at(self, call: str | int) -> CallPlan:
        """The plan of a call."""
        name = self.order[call] if isinstance(call, int) else call
        if name not in self.calls:
            block = self.graph.blocks[self.graph.calls[name].block]
            self.calls[name] = CallPlan(name, block.type, self.positions[name])
        return self.calls[name]

    def add(self, buffer: Buffer, how: Policy) -> None:
        """One buffer with its policy."""
        copied = self.argument(buffer) if buffer.copy_of and isinstance(how, Recompute) else ""
        plan = BufferPlan(buffer.name, how, buffer.bytes, copied)
        maker = self.at(buffer.born)
        if buffer.kind == "derived":
            maker.derived[int(buffer.name.rpartition("~")[2])] = plan
            maker.windows |= how.codec == "window"
        else:
            path = buffer.name[len(maker.name) + 1 :]
            maker.born["" if path == "out" else path] = plan
            self.at(self.layout.leaves_after.get(buffer.name, self.order[buffer.last])).leaving.append(buffer.name)
            if how.codec == "sparse" and buffer.done < buffer.last:
                self.at(buffer.done).counted.append(buffer.name)
        for place in buffer.shapes:
            self.at(place).shape_only.add(buffer.name)
        for place in buffer.savers:
            self.at(place).saves = True
            self.at(place).signs |= how.codec == "sign"
        if isinstance(how, Recompute) and not buffer.copy_of:
            for writer in buffer.writers:  # views that others write through are not run again: memory is all they need
                if self.positions[writer] == buffer.born or self.graph.calls[writer].mutates:
                    self.at(writer).records = True
        if how.offloads:
            self.bytes += room_below(buffer, how)

    def copies(self) -> None:
        """Where copies out must be over, and where copies back start."""
        for call, names in self.layout.released_after.items():
            self.at(call).released += names
        for call in (*self.layout.released_before, *self.layout.fetched_before):
            self.at(call).stops = True

    def argument(self, buffer: Buffer) -> str:
        """The path of the argument that a derived tensor is a copy of."""
        call = self.order[buffer.born]
        step = next(s for s in self.graph.recording.steps if s.name == call)
        found = leaves((step.args, step.kwargs), Ref)
        return next(path for path, ref in found if ref.kind == "value" and ref.name == buffer.copy_of)

    def table(self, reassociated: bool) -> PolicyTable:
        """Everything by the module in which it happens."""
        named = paths(self.model)
        nodes = {
            path: ModulePlans(module, path, kind_of(module) if path else "container") for module, path in named.items()
        }
        for name, plan in self.calls.items():
            norm = plan.records and plan.type in NORMS  # whose statistics are wanted
            plan.direct = not (plan.derived or plan.shape_only or plan.signs)
            plan.ends = bool(plan.stops or plan.counted or plan.leaving or plan.released)
            plan.special = bool(plan.rows_per_chunk or plan.windows or plan.signs)
            plan.hooked = bool(plan.saves or plan.derived or plan.shape_only or norm)
            block, _, count = name.rpartition("#")
            if (node := nodes.get(block)) is not None and node.kind == "module":
                node.calls[int(count)] = plan
            elif block.endswith("()"):
                inside, _, function = block.removesuffix("()").rpartition(".")
                if (node := nodes.get(inside)) is not None:
                    node.functions.setdefault(function, {})[int(count)] = plan
        return PolicyTable(
            root=nodes[""],
            nodes={id(module): nodes[path] for module, path in named.items()},
            calls=self.calls,
            length=len(self.order),
            released_late={self.positions[k]: tuple(v) for k, v in self.layout.released_before.items()},
            fetched={self.positions[k]: tuple(v) for k, v in self.layout.fetched_before.items()},
            renorm=BatchNormRecompute(reassociated),
            offloaded_bytes=self.bytes,
        )
