"""What the planner knows of every call: seconds, bytes, and which memory and parameters they are in.

Measured costs and estimates from shapes both become `CallWeights`, so partitioning does not depend on where a number
came from. Memory saved for backward is listed by name: the same memory saved by two calls of one stage is held once,
but if a cut separates the two, both sides hold it. Parameters are listed by name too: one that several calls use is
*tied*.

`CallWeights.of` takes any costs that list calls, be it the package's own or a handful of numbers;
`outcore.planner.weights_from_shapes` makes weights from shapes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from outcore.cost.costs import Costs
from outcore.cost.predicted.step_time import backward_with_sums
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.planner.memory.copy_schedule import OffloadTarget

__all__ = ["CallWeight", "CallWeights", "fixed_tensors"]


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

    @property
    def saved_bytes(self) -> int:
        """All bytes it saves for backward."""
        return sum(self.saved.values())

    @property
    def time_s(self) -> float:
        """Forward and backward."""
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
    overhead_s: float = 0.0
    """Time of a call that does not depend on the batch: contained in both forward and backward."""
    source: str = "given"
    costs: Costs | None = field(default=None, compare=False, repr=False)
    """What they were made from, where that is known; policies inside stages are planned with it."""
    tier: OffloadTarget | None = field(default=None, compare=False, repr=False)
    """The memory below a device, if values may be offloaded to it."""

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
    def of(cls, graph: Graph, costs: Any, *, state_per_parameter: float = 2.0, overhead_s: float = 0.0) -> CallWeights:
        """Weights from costs: measured ones, or any object whose ``calls`` maps names to objects with fields.

        A call's cost may give ``forward_s`` and ``backward_s`` or timings ``forward`` and ``backward`` with a
        ``median_s``; ``saved_bytes`` or ``saved`` entries; ``workspace_bytes`` or one for forward and one for backward;
        ``parameter_bytes``. What is missing counts as nothing.
        """
        rows: Mapping[str, Any] = getattr(costs, "calls", costs)
        if missing := [name for name in graph.calls if name not in rows]:
            raise PlanError(
                f"the costs say nothing of {missing[0]} (and {len(missing) - 1} other calls of {len(graph.calls)}); "
                "measure this graph, or estimate its weights"
            )
        sizes: dict[str, int] = dict(getattr(costs, "parameters", {}))
        known = bool(sizes) or hasattr(costs, "parameters")
        untrained = fixed_tensors(graph, sizes)
        calls = {}
        between_s = float(getattr(costs, "between_s", 0.0))
        whole = costs if isinstance(costs, Costs) else None
        backward = backward_with_sums(graph, whole) if whole is not None else {}
        for name, call in graph.calls.items():
            row = rows[name]
            if not known and (nbytes := int(getattr(row, "parameter_bytes", 0))):
                new = [p for p in call.parameters if p not in sizes]
                sizes.update({p: nbytes if i == 0 else 0 for i, p in enumerate(new)})
            trained = tuple(p for p in call.parameters if p in sizes)
            fixed = {p: untrained[p] for p in call.parameters if p in untrained}
            if graph.executable is None and known:
                rest = int(getattr(row, "parameter_bytes", 0)) - sum(sizes[p] for p in trained)
                fixed = {f"{call.block} fixed": rest} if rest > 0 else {}
            calls[name] = CallWeight(
                _seconds(row, "forward") + _on_a_cpu_s(getattr(row, "forward", None), between_s),
                backward[name].median_s + _on_a_cpu_s(backward[name], between_s)
                if name in backward
                else _seconds(row, "backward"),
                _saved(name, row),
                _workspace(row),
                trained,
                fixed,
                _host_s(getattr(row, "forward", None), between_s),
                _host_s(backward.get(name, getattr(row, "backward", None)), between_s),
            )
        last = next((name for name in reversed(calls) if calls[name].host_backward_s), None)
        if last is not None and whole is not None:  # where backward begins, which the host starts
            calls[last] = replace(calls[last], host_backward_s=calls[last].host_backward_s + whole.start_s)
        return cls(calls, sizes, state_per_parameter, overhead_s=overhead_s, source="costs", costs=whole)


def fixed_tensors(graph: Graph, trained: Mapping[str, int]) -> dict[str, int]:
    """Bytes of the buffers and frozen parameters that calls use; none are known for a graph without its model."""
    if graph.executable is None:
        return {}
    model = graph.module.model
    used = {p for call in graph.calls.values() for p in call.parameters} - set(trained)
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.numel() * tensor.element_size() for name, tensor in every if name in used}


def _seconds(row: Any, which: str) -> float:
    if (given := getattr(row, f"{which}_s", None)) is not None:
        return float(given)
    timing = getattr(row, which, None)
    return 0.0 if timing is None else float(timing.median_s)


def _host_s(timing: Any, between_s: float) -> float:
    """What the host takes to launch a call; nothing on a CPU, where launching is part of running."""
    issuing_s = float(getattr(timing, "dispatch_s", 0.0))
    return issuing_s + between_s if issuing_s else 0.0


def _on_a_cpu_s(timing: Any, between_s: float) -> float:
    """What lies between calls where launching is part of running."""
    return between_s if timing is not None and not float(getattr(timing, "dispatch_s", 0.0)) else 0.0


def _saved(name: str, row: Any) -> dict[str, int]:
    entries = getattr(row, "saved", None)
    if entries is None:
        nbytes = int(getattr(row, "saved_bytes", 0))
        return {f"{name} saved": nbytes} if nbytes else {}
    if isinstance(entries, Mapping):
        return dict(entries)
    return {e.of: e.bytes for e in entries if e.kind in ("value", "derived")}


def _workspace(row: Any) -> int:
    if (given := getattr(row, "workspace_bytes", None)) is not None:
        return int(given)
    return max(int(getattr(row, f"workspace_{which}_bytes", 0)) for which in ("forward", "backward"))
