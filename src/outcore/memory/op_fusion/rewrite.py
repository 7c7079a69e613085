"""A network with some of its calls replaced, as planning and replaying see it.

Where a fused operation only takes less time, its step is replaced when it runs and nothing else changes. Where it also
writes another type, saves other tensors or makes a call needless, memory changes, and plans have to know: then graph,
recording and costs are rewritten before anything is planned. The user's own recording is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from outcore.cost.costs import CallCost, Costs
from outcore.cost.saved import Saved
from outcore.graph import Call, Graph
from outcore.graph.parts import Value
from outcore.graph.record.recording import Step
from outcore.ops.registry import kinds, operation


@dataclass
class Rewrite:
    """A graph and its costs while calls are being replaced."""

    graph: Graph
    costs: Costs
    values: dict[str, Value] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    steps: dict[str, Step] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = self.values or dict(self.graph.values)
        self.calls = self.calls or dict(self.graph.calls)
        self.rows: dict[str, CallCost] = dict(self.costs.calls)

    def sharing(self, value: str) -> list[str]:
        """The values in the memory that begins with one."""
        return [name for name, other in self.values.items() if other.base == value]

    def renamed(self, old: str, new: str) -> None:
        """Rename a buffer that began with one value and begins with another now, in everything that refers to it."""
        for name in self.sharing(old):
            self.values[name] = replace(self.values[name], alias_of=None if name == new else new)
        for name, row in self.rows.items():
            if any(saved.of == old for saved in row.saved):
                kept = tuple(replace(s, of=new) if s.of == old else s for s in row.saved)
                self.rows[name] = replace(row, saved=kept)

    def result(self) -> tuple[Graph, Costs]:
        """The rewritten graph with its recording, and the costs."""
        if not self.steps:
            return self.graph, replace(self.costs, calls=self.rows)
        assert self.graph.executable is not None
        module, recording = self.graph.executable
        steps = [replace(self.steps.get(s.name, s)) for s in recording.steps]
        known = {f.name: getattr(self.graph, f.name) for f in fields(self.graph)} | {
            "values": self.values,
            "calls": self.calls,
            "executable": (module, replace(recording, steps=steps, dropped=False)),
        }
        return _Rewritten(**known, of=self.graph.fingerprint), replace(self.costs, calls=self.rows)


@dataclass(frozen=True)
class _Rewritten(Graph):
    """A rewritten graph that keeps the fingerprint of the user's, so that its plans and costs are found in the
    caches."""

    of: str = ""

    @property
    def fingerprint(self) -> str:
        """The fingerprint of what was recorded."""
        return self.of


_CASTING = {layer for name in ("linear", *kinds("convolution")) for layer in operation(name).modules}


def copy_of(value: str, cost: CallCost, graph: Graph) -> Saved | None:
    """The half-precision copy that a layer makes and saves of what is in the memory of a value, if it does."""
    if cost.type not in _CASTING or graph.values[value].dtype != "float32":
        return None
    for saved in cost.saved:
        of = saved.cast_of if saved.derived is not None and saved.derived.dtype in ("float16", "bfloat16") else ""
        if of in graph.values and graph.values[of].base == graph.values[value].base:  # else of a parameter
            return saved
    return None


def written_later(graph: Graph, value: str, call: str) -> bool:
    """Whether the memory of a value is overwritten after a call has read it."""
    first = graph.values[value].base
    order = list(graph.calls)
    later = order[order.index(call) + 1 :]
    return any(graph.values[v].base == first for name in later for v in graph.calls[name].mutates)


def as_it_is(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """What is left of a call whose work another one does now: its input."""
    return x
