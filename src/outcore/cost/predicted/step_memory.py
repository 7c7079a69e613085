"""How much memory a training step holds at every moment, and what is in it at the peak.

The peak is not a sum over layers. A value lives from the call that makes it to the last that needs it, forward or
backward; gradients of values live for a moment during backward; gradients of parameters appear one by one as backward
produces them. In forward a value also lives as long as the user's code holds it, in a variable or a list
(`outcore.cost.predicted.held_values`); what an attribute of the model holds is there from step to step, and while the
next one is made there are two. `memory_curve` simulates one step (forward, backward in the opposite order, optimizer)
and keeps a list of what is alive.

    forward    | v1 v2 v3 ........ vn |                      values needed by backward accumulate
    backward                          | gn ... g2 g1 |       and are freed, while gradients accumulate

Autograd runs backward in exactly the reverse order of forward, adds up gradients of a value in place where nothing else
holds them, and passes a gradient on without a copy where it can (sums, views): so does this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from outcore.cost.costs import CallCost, Costs
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.held_values import held_values
from outcore.errors import OutcoreError
from outcore.graph import Call, Graph
from outcore.graph.parts import ROOT, ancestors

_GRANULARITY = {"cuda": 512}
"""The device's allocator rounds sizes up to multiples of this."""

Category = Literal["weights", "gradients", "state", "inputs", "feature_maps", "feature_gradients", "workspace"]


@dataclass(frozen=True, slots=True)
class BytesByUse:
    """Memory by what it is for."""

    weights: int = 0
    gradients: int = 0
    """Of the parameters."""
    state: int = 0
    """Of the optimizer."""
    inputs: int = 0
    feature_maps: int = 0
    """Values of the network, and what backward derived from them."""
    feature_gradients: int = 0
    workspace: int = 0
    """The workspace of an operation."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, f.name) for f in fields(self))

    def __str__(self) -> str:
        parts = [(f.name.replace("_", " "), getattr(self, f.name)) for f in fields(self)]
        return ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in parts if size)


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """What is held while one call runs."""

    phase: Literal["forward", "backward", "optimizer"]
    call: str
    """Empty for the optimizer."""
    bytes: BytesByUse


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """One piece of memory at the peak."""

    name: str
    block: str
    category: Category
    bytes: int


@dataclass(frozen=True)
class MemoryCurve:
    """The memory of one training step over time."""

    moments: tuple[MemoryMoment, ...]
    composition: tuple[HeldMemory, ...]
    """What is held at the peak, the largest first."""

    @cached_property
    def peak(self) -> MemoryMoment:
        """The moment of the peak."""
        return max(self.moments, key=lambda m: m.bytes.total)

    @property
    def peak_bytes(self) -> int:
        """The most that is ever held."""
        return self.peak.bytes.total

    @property
    def at_peak(self) -> BytesByUse:
        """The peak by category."""
        return self.peak.bytes

    def by_block(self, depth: int = 1) -> dict[str, int]:
        """The peak by the block that made or owns what is held, the largest first; the rest under ``""``."""
        found: dict[str, int] = {}
        for held in self.composition:
            line = [*ancestors(held.block), held.block] if held.block else [ROOT]
            path = line[min(depth, len(line)) - 1]
            found[path] = found.get(path, 0) + held.bytes
        return dict(sorted(found.items(), key=lambda row: -row[1]))

    def to_json(self) -> dict[str, Any]:
        """Plain values: the peak, and one row of numbers per moment."""
        names = [f.name for f in fields(BytesByUse)]
        return {
            "peak_bytes": self.peak_bytes,
            "peak": {"phase": self.peak.phase, "call": self.peak.call},
            "categories": names,
            "moments": [[m.phase, m.call, *(getattr(m.bytes, n) for n in names)] for m in self.moments],
            "by_block": self.by_block(),
        }

    def __str__(self) -> str:
        where = f"{self.peak.phase} of {self.peak.call}" if self.peak.call else "the optimizer's step"
        return f"peak {self.peak_bytes / 2**20:,.1f} MiB in {where}: {self.at_peak}"


def memory_curve(
    graph: Graph,
    costs: Costs,
    *,
    optimizer: OptimizerCost | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | float = 2.0,
) -> MemoryCurve:
    """The memory of a training step of a network.

    Args:
        graph: the network; if it ends in a loss, the loss is part of it, otherwise a gradient for each of its
            outputs is there when backward begins.
        costs: its costs, from `outcore.measure` or `outcore.cost.account`.
        optimizer: a class, a function of the parameters, or the size of its state over that of the
            parameters.
    """
    if costs.fingerprint != graph.fingerprint:
        raise OutcoreError(
            f"these costs belong to graph {costs.fingerprint}, but this is {graph.fingerprint}; measure this one"
        )
    if not isinstance(optimizer, OptimizerCost):
        optimizer = OptimizerCost.of(optimizer, costs.device_kind)
    moments = _Play(graph, costs, optimizer).run()
    peak = max(range(len(moments)), key=lambda i: moments[i].bytes.total)
    again = _Play(graph, costs, optimizer, stop=peak)
    again.run()
    return MemoryCurve(tuple(moments), tuple(sorted(again.at_stop, key=lambda h: -h.bytes)))


class _Play:
    """One step, simulated."""

    def __init__(self, graph: Graph, costs: Costs, optimizer: OptimizerCost, stop: int = -1) -> None:
        self.graph, self.costs, self.optimizer, self.stop = graph, costs, optimizer, stop
        self.order = list(graph.calls.values())
        self.trained = calls_with_backward(graph, costs)
        reached = {g.of for name in self.trained for g in costs.calls[name].gradients}
        self.stepped = {name: size for name, size in costs.parameters.items() if name in reached}
        """The parameters that get a gradient; the optimizer skips the others."""
        self.grain = _GRANULARITY.get(costs.device_kind, 1)
        self.held: dict[str, HeldMemory] = {}
        self.sums = dict.fromkeys((f.name for f in fields(BytesByUse)), 0)
        self.moments: list[MemoryMoment] = []
        self.at_stop: list[HeldMemory] = []
        self.uses: dict[str, int] = {}
        self.savers: dict[str, set[str]] = {}
        for i, call in enumerate(self.order):
            for name in (*call.inputs, *call.outputs):
                self.uses[self.graph.values[name].base] = i
            for saved in costs.calls[call.name].saved if call.name in self.trained else ():
                self.savers.setdefault(saved.of, set()).add(call.name)
        holding = held_values(graph, costs, self.trained)
        for name, until in holding.memory.items():
            if name in self.uses:
                self.uses[name] = max(self.uses[name], until)
        self.kept = {self.graph.values[name].base for name in (*graph.inputs, *graph.outputs)}
        self.outliving = holding.outliving - self.kept
        self.kept |= self.outliving
        self.branches: dict[int, list[str]] = {}
        """Calls that backward does not come to, by the last call that runs while what they saved is there."""
        for name, until in holding.branches.items():
            self.branches.setdefault(until, []).append(name)
        self.ends: dict[int, list[str]] = {}
        for name, i in self.uses.items():
            self.ends.setdefault(i, []).append(name)
        self.gradient: dict[str, str] = {}
        self.sharing: dict[str, int] = {}

    def run(self) -> list[MemoryMoment]:
        """Simulate forward, backward and the optimizer's step."""
        for name, size in self.costs.parameters.items():
            self.take(f"weight {name}", name.rpartition(".")[0], "weights", size)
        self.take("frozen weights and buffers", "", "weights", self.costs.fixed_bytes)
        self.take("optimizer", "", "state", self.optimizer.state_bytes(self.stepped))
        self.take("libraries", "", "workspace", self.costs.library_bytes)
        for name in self.graph.inputs:
            self.take(self.graph.values[name].base, "", "inputs", self.graph.values[name].bytes)
        for name in self.outliving:
            self.take(f"{name} of the step before", name.rpartition("#")[0], "feature_maps", self.size(name))
        for i, call in enumerate(self.order):
            self.forward(i, call, self.costs.calls[call.name])
        for name in _differentiated(self.graph):
            self.receive(name, self.new_gradient(name, "", self.graph.values[name].bytes))
        for call in reversed(self.order):
            if call.name in self.trained:
                self.backward(call, self.costs.calls[call.name])
        self.moment("optimizer", "", self.optimizer.workspace_bytes(self.stepped))
        return self.moments

    def forward(self, i: int, call: Call, cost: CallCost) -> None:
        """Outputs appear, with what backward will need; values used for the last time are freed."""
        for name, size in cost.outputs.items():
            if self.graph.values[name].base == name:
                self.take(name, call.block, "feature_maps", size)
        for saved in cost.saved:
            if saved.kind == "derived":
                self.take(saved.of, call.block, "feature_maps", saved.bytes)
        self.moment("forward", call.name, cost.workspace_forward_bytes)
        for saved in (saved for name in self.branches.get(i, ()) for saved in self.costs.calls[name].saved):
            if saved.kind == "derived":
                self.give(saved.of)
        for name in self.outliving.intersection(cost.outputs):
            self.give(f"{name} of the step before")
        for name in self.ends.get(i, ()):
            if name not in self.kept and not self.savers.get(name):
                self.give(name)

    def backward(self, call: Call, cost: CallCost) -> None:
        """Gradients of the inputs and parameters appear; those of the outputs are freed, and what was saved for this
        call."""
        for saved in cost.saved:
            if saved.kind == "value" and saved.of not in self.held:
                self.take(saved.of, call.block, "feature_maps", self.size(saved.of))
        made, latest = [], ""
        sums: list[int] = []
        for gradient in cost.gradients:
            if gradient.passes is not None:
                made.append((gradient.of, self.gradient.get(gradient.passes, "")))
            elif gradient.of in self.graph.values:
                if gradient.bytes or not latest:
                    latest = self.new_gradient(gradient.of, call.block, gradient.bytes)
                made.append((gradient.of, latest))
            elif f"gradient {gradient.of}" in self.held:  # to be added to what is there
                made.append(("", self.new_gradient(gradient.of, call.block, gradient.bytes)))
                sums.append(gradient.bytes)
            else:
                self.take(f"gradient {gradient.of}", call.block, "gradients", gradient.bytes)
        self.moment("backward", call.name, cost.workspace_backward_bytes)
        for saved in cost.saved:
            waiting = self.savers.get(saved.of, set())
            waiting.discard(call.name)
            if saved.kind == "derived" or (saved.kind == "value" and not waiting and saved.of not in self.kept):
                self.give(saved.of)
        given = [self.gradient.pop(name, "") for name in call.outputs]
        passed = {memory for _, memory in made}
        for memory in given:  # autograd has let go of them before it adds what was made to anything
            if memory not in passed:
                self.let_go(memory)
        for name, memory in made:
            if name:
                self.receive(name, memory, call.name)
        for memory in given:
            if memory in passed:
                self.let_go(memory)
        for size in sums:  # those of a parameter that several calls use are never added in place
            self.moment("backward", call.name, size)
        for _, memory in made:
            if not self.sharing.get(memory):
                self.give(memory)

    def receive(self, name: str, memory: str, call: str = "") -> None:
        """Add a gradient to what a value has received.

        Autograd adds in place only if nothing else holds the memory and the gradient fills it.
        """
        before = self.gradient.get(name)
        if not memory:
            return
        if before is None:
            self.gradient[name] = memory
            self.sharing[memory] = self.sharing.get(memory, 0) + 1
            return
        if name in self.graph.values:
            size = self.graph.values[name].bytes
        else:  # a parameter of which several calls take views
            size = self.held[memory].bytes if memory in self.held else 0
        if self.sharing[before] == 1 and before in self.held and self.held[before].bytes < size + self.grain:
            return
        block = self.held[before].block if before in self.held else ""
        self.gradient[name] = total = self.new_gradient(f"{name} (sum)", block, size)
        self.sharing[total] = 1
        self.moment("backward", call, 0)
        self.let_go(before)

    def new_gradient(self, name: str, block: str, size: int) -> str:
        """Memory for a gradient."""
        memory = f"gradient of {name} {len(self.moments)}"
        self.take(memory, block, "feature_gradients", size)
        return memory

    def let_go(self, memory: str) -> None:
        """Drop one reference to a gradient."""
        if memory:
            self.sharing[memory] -= 1
            if not self.sharing[memory]:
                self.give(memory)

    def moment(self, phase: Literal["forward", "backward", "optimizer"], call: str, workspace: int) -> None:
        """Record what is held now, with the workspace of the call."""
        block = self.graph.calls[call].block if call else ""
        self.take("workspace", block, "workspace", workspace)
        if len(self.moments) == self.stop:
            self.at_stop = list(self.held.values())
        self.moments.append(MemoryMoment(phase, call, BytesByUse(**self.sums)))
        self.give("workspace")

    def take(self, name: str, block: str, category: Category, size: int) -> None:
        """Allocate memory."""
        if name in self.held or not size:
            return
        size = -(-size // self.grain) * self.grain
        self.held[name] = HeldMemory(name, block, category, size)
        self.sums[category] += size

    def give(self, name: str) -> None:
        """Free memory."""
        held = self.held.pop(name, None)
        if held is not None:
            self.sums[held.category] -= held.bytes

    def size(self, name: str) -> int:
        producer = self.graph.values[name].producer
        return self.costs.calls[producer].outputs.get(name, 0) if producer else 0


def _differentiated(graph: Graph) -> list[str]:
    """The outputs that backward starts from: not those from which the model has made its loss already."""
    wanted = [name for name in graph.outputs if graph.values[name].requires_grad]
    losses = [name for name in wanted if not graph.values[name].shape]
    inside = set(losses)
    for call in reversed(list(graph.calls.values())) if losses else ():
        if inside.intersection(call.outputs):
            inside.update(call.inputs)
    return [name for name in wanted if name in losses or name not in inside]


def calls_with_backward(graph: Graph, costs: Costs) -> set[str]:
    """The calls that backward goes through: those whose outputs lead to the network's."""
    wanted = {name for name in graph.outputs if graph.values[name].requires_grad}
    found: set[str] = set()
    for call in reversed(list(graph.calls.values())):
        cost = costs.calls[call.name]
        if wanted.intersection(call.outputs) and cost.gradients:
            found.add(call.name)
            wanted.update(g.of for g in cost.gradients if g.of in graph.values)
    return found
