"""What the planner knows of every call: seconds, bytes, and which memory and parameters they are in.

Measured and estimated costs both become `CallWeights`, so partitioning does not depend on where a number came from.
Memory saved for backward is listed by name: the same memory saved by two calls of one stage is held once, but if a cut
separates the two, both sides hold it. Parameters are listed by name too: one that several calls use is *tied*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outcore.cost.costs import Costs
from outcore.cost.predicted.step_time import backward_with_sums
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.machine.clock import TimedRuns
from outcore.planner.memory.copy_schedule import OffloadTarget

_LONGEST_LAUNCH = 10.0
"""Times what the host takes to launch a sum, for each operation of a call."""


@dataclass(frozen=True, slots=True)
class CallWeight:
    """The costs of one call, for the batch the graph was recorded with."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    saved: Mapping[str, int] = field(default_factory=dict)
    """Memory saved from forward to backward: name of the first value in it (or of what backward derived) -> bytes."""
    workspace_bytes: int = 0
    parameters: tuple[str, ...] = ()
    """Names of the trained parameters it reads."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Buffers and frozen parameters: name -> bytes."""
    host_forward_s: float = 0.0
    """What the host takes to launch it on a GPU, whatever the batch; with the Python around it."""
    host_backward_s: float = 0.0
    fixed_forward_s: float = 0.0
    """Of its seconds, those that a part of the batch takes too, where that was measured."""
    fixed_backward_s: float = 0.0

    @property
    def saved_bytes(self) -> int:
        """All bytes it saves for backward."""
        return sum(self.saved.values())

    @property
    def time_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class CallWeights:
    """The weights of every call of a graph."""

    calls: Mapping[str, CallWeight]
    parameters: Mapping[str, int]
    """Bytes of every trained parameter, by name."""
    state_per_parameter: float = 2.0
    """Optimizer state over parameter bytes: 2 for Adam, 1 for SGD with momentum."""
    update_bytes_per_s: float = float("inf")
    """Parameter, gradient and state bytes an optimizer's step gets through in a second."""
    parameter_bytes_per_s: float = float("inf")
    """How fast a device reads and writes parameters and their gradients: once in forward and twice in backward, where
    it was not measured what a part of the batch takes, and three times more to add up the gradients of micro-batches,
    however small those are."""
    costs: Costs | None = field(default=None, compare=False, repr=False)
    """What they were made from, where that is known; policies inside stages are planned with it."""
    tier: OffloadTarget | None = field(default=None, compare=False, repr=False)
    """The memory below a device, if values may be offloaded to it."""
    update_workspace: tuple[float, float] = (0.0, 0.0)
    """What the optimizer's step needs on top: over the bytes of all parameters, and over those of the largest."""

    @property
    def tied(self) -> dict[str, tuple[str, ...]]:
        """Parameters that several calls use, with those calls."""
        users: dict[str, list[str]] = {}
        for name, weight in self.calls.items():
            for parameter in weight.parameters:
                users.setdefault(parameter, []).append(name)
        return {parameter: tuple(calls) for parameter, calls in users.items() if len(calls) > 1}

    def parameter_bytes(self, call: str) -> int:
        """Bytes of the parameters a call owns: a tied one belongs to the first call that uses it."""
        tied = self.tied
        owned = (p for p in self.calls[call].parameters if p not in tied or tied[p][0] == call)
        return sum(self.parameters.get(p, 0) for p in owned)

    @classmethod
    def of(cls, graph: Graph, costs: Costs) -> CallWeights:
        """Weights from costs, measured or estimated."""
        if missing := [name for name in graph.calls if name not in costs.calls]:
            raise PlanError(
                f"the costs say nothing of {missing[0]} (and {len(missing) - 1} other calls of {len(graph.calls)}); "
                "measure this graph, or estimate its weights"
            )
        sizes = dict(costs.parameters)
        untrained = fixed_tensors(graph, sizes)
        backward = backward_with_sums(graph, costs)
        calls = {}
        for name, call in graph.calls.items():
            row, back = costs.calls[name], backward.get(name)
            trained = tuple(p for p in call.parameters if p in sizes)
            fixed = {p: untrained[p] for p in call.parameters if p in untrained}
            if graph.executable is None:
                rest = row.parameter_bytes - sum(sizes[p] for p in trained)
                fixed = {f"{call.block} fixed": rest} if rest > 0 else {}
            calls[name] = CallWeight(
                _device_s(row.forward, costs.between_s),
                _device_s(back, costs.between_s),
                {entry.of: entry.bytes for entry in row.saved if entry.kind in ("value", "derived")},
                max(row.workspace_forward_bytes, row.workspace_backward_bytes),
                trained,
                fixed,
                _host_s(row.forward, costs, row.issue_forward),
                _host_s(back, costs, row.issue_backward),
                _fixed_s(row.forward, row.fixed_forward_s, costs.between_s),
                _fixed_s(back, row.fixed_backward_s, costs.between_s),
            )
        last = next((name for name in reversed(calls) if calls[name].host_backward_s), None)
        if last is not None:  # where backward begins, which the host starts
            calls[last] = replace(calls[last], host_backward_s=calls[last].host_backward_s + costs.start_s)
        return cls(calls, sizes, costs=costs)


def fixed_tensors(graph: Graph, trained: Mapping[str, int]) -> dict[str, int]:
    """Bytes of the buffers and frozen parameters that calls use; none are known for a graph without its model."""
    if graph.executable is None:
        return {}
    model = graph.module.model
    used = {p for call in graph.calls.values() for p in call.parameters} - set(trained)
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.numel() * tensor.element_size() for name, tensor in every if name in used}


def _host_s(timing: TimedRuns | None, costs: Costs, operations: float) -> float:
    """What the host takes to launch a call; nothing on a CPU, where launching is part of running.

    A host that takes many times what it takes to launch as many operations, and much of the device's time, waits for
    the device (for memory to be freed, say). That is no time of its own: it shrinks with the call.
    """
    if timing is None or not timing.dispatch_s:
        return 0.0
    most_s = _LONGEST_LAUNCH * max(1.0, operations) * costs.sum_dispatch_s
    waits = 0 < most_s < timing.dispatch_s and timing.dispatch_s > timing.median_s / 4
    return (most_s if waits else timing.dispatch_s) + costs.between_s


def _device_s(timing: TimedRuns | None, between_s: float) -> float:
    """What the device takes for a call; on a CPU with what lies between calls."""
    if timing is None:
        return 0.0
    return timing.median_s if timing.dispatch_s else timing.median_s + between_s


def _fixed_s(timing: TimedRuns | None, fixed_s: float, between_s: float) -> float:
    """What a part of the batch takes too; on a CPU with what lies between calls."""
    if timing is None or not fixed_s:
        return 0.0
    return fixed_s if timing.dispatch_s else fixed_s + between_s
