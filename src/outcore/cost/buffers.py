"""The memory of a network's values between forward and backward: who needs it, and how it could come back.

A *buffer* is one piece of memory that one or several values share (a value, its views, what in-place operations make
of it), or a tensor that an operation derives for its own backward (a mask, indices). It is the unit in which memory is
kept, dropped, moved and encoded.

For every buffer: which calls make it, who needs it in backward and of what it needs there, and whether it can be made
again: its *writers* are run again, from the buffers they read, its *sources*. That is allowed only if every writer can
be run again (`outcore.ops.recompute_encode`) and no source is overwritten after it was read. Of what operations derive,
only the copies in another type that autocast makes of their inputs are made again: by the same cast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outcore.cost.costs import CallCost, Costs
from outcore.cost.predicted.held_values import held_values
from outcore.cost.predicted.step_memory import calls_with_backward
from outcore.cost.saved import Saved
from outcore.graph import Graph
from outcore.graph.record.keys import hooks_of
from outcore.graph.record.recording import Ref
from outcore.graph.structure import leaves
from outcore.ops.recompute_encode import PIXELS, POOLS, Need, again, can_be_held, need
from outcore.ops.registry import find, names, operation, spatial_dims


@dataclass(frozen=True, slots=True)
class Buffer:
    """One piece of memory."""

    name: str
    """The first value in it; ``call~1`` for a derived tensor."""
    kind: Literal["value", "derived", "given"]
    """Given: an input or output of the network or what an attribute of it holds, which are there anyway, or memory of
    the model's own tensors."""
    bytes: int
    element_bytes: int
    born: int
    """Position of the call that makes it; -1 for an input."""
    done: int
    """Position of the last call that writes into it."""
    last: int
    """Position of the last call that uses it in forward."""
    savers: Mapping[int, Need]
    """Positions of the calls whose backward needs it, with what they need of it."""
    shapes: frozenset[int] = frozenset()
    """Positions of the calls whose backward keeps it but needs no more than its shape."""
    dtype: str = ""
    """For a derived tensor: its type."""
    maker: str = ""
    """For a derived tensor: the type of the call that made it; empty where its smaller form would not hold it."""
    writers: tuple[str, ...] = ()
    """The calls that make it again, in order."""
    sources: tuple[str, ...] = ()
    """The buffers they read."""
    opaque: bool = False
    """Kept by an operation that may ask for it more than once."""
    obstacle: str = ""
    """Why it cannot be made again; empty if it can."""
    again_s: float = 0.0
    """Time to make it again, once its sources are there."""
    workspace_bytes: int = 0
    """Room that takes for a moment."""
    drawn: bool = False
    """A writer draws random numbers."""
    held: int = -1
    """Position of the last call in forward that runs while the user's code holds it, where that is after its last use:
    until then its memory is there, whatever its policy."""
    copy_of: str = ""
    """For a derived tensor: the value of which it is a copy in another type, if it is one."""

    @property
    def need(self) -> Need:
        """The most that any backward needs of it."""
        found = set(self.savers.values())
        return "sign" if found == {"sign"} else "full" if found or not self.shapes else "shape"


def buffers_of(graph: Graph, costs: Costs) -> dict[str, Buffer]:
    """All buffers of a network, by name, in the order in which they are made.

    >>> import outcore, torch
    >>> from outcore.cost.measured.saved_bytes import account
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(inplace=True))
    >>> graph = outcore.capture(net, [(1, 3, 10, 10)])
    >>> buffers = buffers_of(graph, account(graph))
    >>> [(b.name, b.writers, b.sources) for b in buffers.values() if b.kind == "value"]
    [('0#0:out', ('0#0',), ('input',))]
    >>> buffers["1#0:out"].kind, buffers["1#0:out"].writers  # the network's output, in the memory of batch norm's
    ('given', ('1#0', '2#0'))
    """
    return _Survey(graph, costs).buffers()


class _Survey:
    """Goes through a graph once and notes who makes, reads and keeps what."""

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.graph, self.values, self.costs = graph, graph.values, costs
        self.order = list(graph.calls)
        self.place = {name: i for i, name in enumerate(self.order)}
        self.trained = calls_with_backward(graph, costs)
        holding = held_values(graph, costs, self.trained)
        self.given = {self.values[v].base for v in (*graph.inputs, *graph.outputs)} | holding.outliving
        self.held = holding.memory
        self.writers: dict[str, list[str]] = {}
        self.readers: dict[str, list[int]] = {}
        self.sizes = {name: graph.values[name].bytes for name in graph.inputs}
        self.savers: dict[str, dict[int, Need]] = {}
        self.steps = graph.recording.calls()
        for i, (name, call) in enumerate(graph.calls.items()):
            self.sizes |= costs.calls[name].outputs
            for value in call.inputs:
                self.readers.setdefault(self.values[value].base, []).append(i)
            for buffer in dict.fromkeys(self.values[v].base for v in (*call.outputs, *call.mutates)):
                known = buffer in self.writers or graph.values[buffer].producer is None
                if not known or self.writes(name, buffer) or any(self.values[v].base == buffer for v in call.outputs):
                    self.writers.setdefault(buffer, []).append(name)
            if name in self.trained:
                self.note_savers(i, costs.calls[name])

    def writes(self, call: str, buffer: str) -> bool:
        """Whether a call changes what is in a buffer, and does not only look at it in another way."""
        return any(self.values[v].base == buffer for v in self.graph.calls[call].mutates)

    def note_savers(self, i: int, cost: CallCost) -> None:
        """Who needs what of it in backward."""
        call = self.graph.calls[cost.call]
        outputs = {self.values[v].base for v in call.outputs}
        weights = any(p in self.costs.parameters for p in call.parameters)
        weights |= any(self.values[v].requires_grad for v in call.inputs[1:])  # computed, as in a parametrization
        first = self.values[call.inputs[0]].base if call.inputs else ""
        for saved in cost.saved:
            if saved.kind == "value":
                role: Literal["input", "output"] = "output" if saved.of in outputs else "input"
                known = need(cost.type, role, weights_trained=weights)
                self.savers.setdefault(saved.of, {})[i] = known if role == "output" or saved.of == first else "full"

    def buffers(self) -> dict[str, Buffer]:
        """Put together what was found."""
        found: dict[str, Buffer] = {}
        for name in self.graph.inputs:
            if self.values[name].base == name:
                found[name] = self.value(name, -1)
        for i, call in enumerate(self.order):
            for value in self.graph.calls[call].outputs:
                if self.values[value].base == value:
                    found[value] = self.value(value, i)
            for saved in self.costs.calls[call].saved if call in self.trained else ():
                if saved.kind == "derived":
                    found[saved.of] = self.derived(i, call, saved)
        return found

    def derived(self, i: int, call: str, saved: Saved) -> Buffer:
        """The buffer of a tensor that a call keeps beside its inputs and outputs."""
        value = self.copied(call, saved)
        writers = self.writers.get(self.values[value].base, ()) if value else ()
        late = [w for w in writers if self.place[w] >= i and self.writes(w, self.values[value].base)]
        obstacle = "made for backward" if not value else f"{late[-1]} overwrites {value}" if late else ""
        read = self.sizes.get(self.values[value].base, saved.bytes) if value else 0
        return Buffer(
            saved.of,
            "derived",
            saved.bytes,
            1,
            i,
            i,
            i,
            {i: "full"},
            dtype=saved.derived.dtype if saved.derived is not None else "",
            maker="" if self.too_wide(call) else self.costs.calls[call].type,
            sources=(self.values[value].base,) if value else (),
            opaque=self.graph.blocks[self.graph.calls[call].block].kind == "opaque",
            obstacle=obstacle,
            again_s=(read + saved.bytes) / (self.costs.sum_bytes_per_s or _CAST_BYTES_PER_S) if value else 0.0,
            copy_of=value,
        )

    def too_wide(self, call: str) -> bool:
        """Whether it is a pool over windows of more pixels than one byte can tell apart."""
        step, kind = self.steps[call], self.costs.calls[call].type
        if kind not in POOLS:
            return False
        module: Any = self.graph.module.model.get_submodule(step.target) if step.kind == "module" else None
        named = step.kwargs.get("kernel_size", step.args[1] if len(step.args) > 1 else 1)
        size = module.kernel_size if module is not None else named
        sizes = (size,) if isinstance(size, int) else tuple(int(s) for s in size)
        return math.prod(sizes * spatial_dims(kind) if len(sizes) == 1 else sizes) > PIXELS

    def copied(self, call: str, saved: Saved) -> str:
        """The input of which autocast made this copy in another type; empty if it is something else."""
        name, known = saved.cast_of, saved.derived
        if known is None or not any(on for _, on, _ in self.steps[call].context.autocast):
            return ""
        if name not in self.graph.calls[call].inputs or self.values[name].dtype == known.dtype:
            return ""
        if known.dtype not in _CAST_TYPES or not known.shape:
            return ""
        count = math.prod(known.shape)
        whole = count == math.prod(self.values[name].shape) and count * _ITEM_BYTES[known.dtype] == saved.bytes
        return name if whole else ""

    def value(self, name: str, born: int) -> Buffer:
        """The buffer that begins with a value."""
        value, writers = self.values[name], self.writers.get(name, [])
        uses = [born, *self.readers.get(name, ()), *(self.place[w] for w in writers)]
        writers = self.without_views(name, writers)
        sources = dict.fromkeys(
            self.values[v].base for w in writers for v in self.graph.calls[w].inputs if self.values[v].base != name
        )
        rows = [self.costs.calls[w] for w in writers]
        saved_by = self.savers.get(name, {})
        return Buffer(
            name=name,
            kind="given" if name in self.given or name not in self.sizes else "value",
            bytes=self.sizes.get(name, 0),
            element_bytes=_ITEM_BYTES.get(value.dtype, 1),
            born=born,
            done=max((self.place[w] for w in writers), default=born),
            last=max(uses),
            held=self.held.get(name, -1),
            savers={i: n for i, n in saved_by.items() if n != "shape"},
            shapes=frozenset(i for i, n in saved_by.items() if n == "shape"),
            writers=tuple(writers),
            sources=tuple(sources),
            opaque=any(self.graph.blocks[self.graph.calls[self.order[i]].block].kind == "opaque" for i in saved_by),
            obstacle=self.obstacle(name, writers) if born >= 0 else "an input",
            again_s=self.again_s(rows) if rows else 0.0,
            drawn=any(again(self.graph.blocks[self.graph.calls[w].block].type) == "random" for w in writers),
            workspace_bytes=max((c.workspace_forward_bytes + _derived_bytes(c) for c in rows), default=0),
        )

    def without_views(self, name: str, writers: list[str]) -> list[str]:
        """The writers that must run to make a buffer again: its first, those that change it, and views of it that these
        read; calls that only look at it in another shape (a reshape, a dropout of nothing) have nothing to make."""
        found: list[str] = []
        read: set[str] = set()
        for writer in reversed(writers):
            call = self.graph.calls[writer]
            makes = writer == writers[0] or self.writes(writer, name) or not read.isdisjoint(call.outputs)
            if makes or self.graph.blocks[call.block].kind == "opaque" or self.hooked(writer):
                found.append(writer)
                read |= {value for value in call.inputs if self.values[value].base == name}
        return found[::-1]

    def again_s(self, writers: list[CallCost]) -> float:
        """Time to run the writers of a buffer again.

        A batch norm has its statistics already and takes ReLU along
        (`outcore.memory.saved_tensors.recompute_batch_norm`): one pass that reads and writes, of the three it took in
        forward. In float32 that is not counted on: cuDNN rounds in an order of its own there, and then the norm runs as
        it ran before.
        """
        seconds = sum(c.forward.median_s for c in writers if c.forward is not None)
        norm, *rest = writers
        alone = norm.forward is not None and norm.type in _NORMS and [c.type in _RELUS for c in rest] in ([], [True])
        if not alone or self.costs.device_kind != "cuda":
            return seconds
        assert norm.forward is not None
        made = self.values[self.graph.calls[norm.call].outputs[0]]
        fused = bool(rest) and not rest[0].saved  # ReLU is part of the norm already
        return norm.forward.median_s * 2 / 3 if fused or made.dtype in ("bfloat16", "float16") else seconds

    def obstacle(self, name: str, writers: list[str]) -> str:
        """Why a buffer cannot be made again."""
        saved = min(self.savers.get(name, {len(self.order): "full"}))
        for writer in writers:
            call = self.graph.calls[writer]
            block = self.graph.blocks[call.block]
            if block.kind == "opaque" or again(block.type) is None:
                return f"{block.type} is not known to give the same numbers again"
            if not self.costs.calls[writer].repeats:
                return f"{writer} has another algorithm in backward, found by torch.backends.cudnn.benchmark"
            if self.hooked(writer):
                return f"{call.block} has hooks, which must not run twice"
            step = self.steps[writer]
            if not all(can_be_held(value, Ref) for value in (*step.args, *step.kwargs.values())):
                return f"{writer} has an argument that somebody could change"
            if self.place[writer] > saved and self.writes(writer, name):
                return f"{writer} overwrites it after backward's copy was taken"
            for value in call.inputs:
                source = self.values[value].base
                late = [w for w in self.writers.get(source, ()) if self.writes(w, source)]
                if source != name and any(self.place[w] >= self.place[writer] for w in late):
                    return f"{late[-1]} overwrites {source}, which {writer} has read"
            if self.renormalises(writer):
                return f"{call.block} writes into its weight"
            written = {self.values[v].base for v in call.mutates} - {name}
            if written:
                return f"{writer} writes into {min(written)}"
        return ""

    def renormalises(self, call: str) -> bool:
        """Whether a call is an embedding that shortens rows of its table before it reads them."""
        step, op = self.steps[call], find(self.costs.calls[call].type)
        if op is None or op.kind != "embedding":
            return False
        if step.kind == "module":
            return getattr(self.graph.module.model.get_submodule(step.target), "max_norm", None) is not None
        return step.kwargs.get("max_norm", step.args[3] if len(step.args) > 3 else None) is not None

    def hooked(self, call: str) -> bool:
        """Whether the user has put hooks on the module of a call, or on one it is given."""
        step, model = self.steps[call], self.graph.module.model
        if any(ref.kind == "module" for _, ref in leaves((step.args, step.kwargs), Ref)):
            return True
        if step.kind != "module":
            return False
        return bool(hooks_of(model.get_submodule(step.target), backward=False))


_CAST_TYPES = ("float32", "float16", "bfloat16")
"""Types to which autocast casts."""
_CAST_BYTES_PER_S = 1e10
"""Where it was not measured."""
_NORMS = operation("batch_norm").modules
_RELUS = names("relu")
_ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    "complex128": 16,
}


def _derived_bytes(cost: CallCost) -> int:
    """What a call makes for its backward beside its outputs (indices, masks, cast copies): again when it runs again."""
    return sum(saved.bytes for saved in cost.saved if saved.kind == "derived")
