"""Units with their weights: all that a partitioner looks at.

Memory is counted by storage: a value together with its views is one piece. A stage holds it from the forward of a
micro-batch to its backward if one of its calls saves it for backward, or if it crosses the stage's border: what was
received stays until its gradient is sent, what was sent stays until its gradient has come. So a long skip counts on
both ends, for as long as it lives there.

Inputs of the model are given to every rank that reads them; outputs made early are sent to the last stage, where the
loss is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from outcore.graph import Graph
from outcore.planner.partition.stage_memory import INPUT, Parameter, SharedMemoryUse, StageMemory, merged
from outcore.planner.partition.units import Units
from outcore.planner.pipeline.call_weights import CallWeight, CallWeights
from outcore.program.stages import Edge, Stage, Stages, Tie


@dataclass(frozen=True, slots=True)
class ValueFlow:
    """A value that goes from one unit to others."""

    value: str
    bytes: int
    producer: int
    users: tuple[int, ...]
    """Ascending, without the producer."""
    to_loss: bool
    has_gradient: bool


@dataclass(frozen=True)
class WeightedUnits:
    """Units, their costs and the values that flow between them."""

    units: Units
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    fixed: tuple[Parameter, ...]
    """Buffers and frozen parameters."""
    memory_uses: tuple[SharedMemoryUse, ...]
    flows: tuple[ValueFlow, ...]
    parameters: tuple[Parameter, ...]
    """The trained ones."""
    state_per_parameter: float = 2.0
    update_bytes_per_s: float = float("inf")
    overhead_forward_s: tuple[float, ...] = ()
    """Part of the forward that a smaller batch does not shorten."""
    overhead_backward_s: tuple[float, ...] = ()
    adding_s: tuple[float, ...] = ()
    """What it takes to add the gradients of one micro-batch to those of the ones before."""
    host_forward_s: tuple[float, ...] = ()
    """What the host takes to launch a unit: a stage is never faster than its host, however small the batch."""
    host_backward_s: tuple[float, ...] = ()
    update_workspace: tuple[float, float] = (0.0, 0.0)
    """Of the optimizer's step: over the bytes of all parameters of a stage, and over those of its largest."""

    def __len__(self) -> int:
        return len(self.units)

    @cached_property
    def time_s(self) -> tuple[float, ...]:
        """Forward and backward of every unit."""
        return tuple(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True))

    @property
    def after(self) -> list[set[int]]:
        """For every unit, those that directly depend on it."""
        found: list[set[int]] = [set() for _ in range(len(self))]
        for i, sources in enumerate(self.units.before):
            for source in sources:
                found[source].add(i)
        return found

    def scaled(self, fraction: float, pieces: int = 1) -> WeightedUnits:
        """The same for a part of the batch: activations, and time beside what is the same for every part, shrink with
        it; parameters do not.

        Args:
            fraction: the part.
            pieces: in which a rank takes its batch, whose gradients are added up.
        """
        if fraction == 1:
            return self
        nothing = (0.0,) * len(self)
        forward = zip(self.forward_s, self.overhead_forward_s or nothing, strict=True)
        backward = zip(self.backward_s, self.overhead_backward_s or nothing, self.adding_s or nothing, strict=True)
        return replace(
            self,
            forward_s=tuple(_part_s(whole, least, fraction) for whole, least in forward),
            backward_s=tuple(
                _part_s(whole, least, fraction) + (1 - 1 / pieces) * adding for whole, least, adding in backward
            ),
            workspace_bytes=tuple(round(b * fraction) for b in self.workspace_bytes),
            memory_uses=tuple(replace(f, bytes=round(f.bytes * fraction)) for f in self.memory_uses),
            flows=tuple(replace(f, bytes=round(f.bytes * fraction)) for f in self.flows),
        )

    @cached_property
    def _holding(self) -> StageMemory:
        return StageMemory(self.memory_uses, self.parameters, self.fixed)

    def held_bytes(self, stage_of: Sequence[int], count: int) -> list[int]:
        """Bytes that every stage holds of one micro-batch, from its forward to its backward."""
        return self._holding.held(np.asarray(stage_of), count)

    def weight_bytes(self, stage_of: Sequence[int], count: int) -> list[int]:
        """The trained parameters of every stage."""
        return self._holding.trained(np.asarray(stage_of), count)

    def fixed_bytes(self, stage_of: Sequence[int], count: int) -> list[int]:
        """The buffers and frozen parameters of every stage."""
        return self._holding.fixed(np.asarray(stage_of), count)

    def update_bytes(self, stage_of: Sequence[int], count: int) -> list[int]:
        """What the optimizer's step of every stage needs on top."""
        of_all, of_largest = self.update_workspace
        largest = [0] * count
        for _, nbytes, users in self.parameters:
            for k in {stage_of[u] for u in users}:
                largest[k] = max(largest[k], nbytes)
        trained = self.weight_bytes(stage_of, count)
        return [round(of_all * every + of_largest * one) for every, one in zip(trained, largest, strict=True)]

    def cut(self, stage_of: Sequence[int], count: int) -> Stages:
        """The stages that an assignment of units makes."""
        held, weights = self.held_bytes(stage_of, count), self.weight_bytes(stage_of, count)
        fixed, update = self.fixed_bytes(stage_of, count), self.update_bytes(stage_of, count)
        edges = []
        for flow in self.flows:
            producer_stage = stage_of[flow.producer]
            places = {stage_of[u] for u in flow.users} | ({count - 1} if flow.to_loss else set())
            if targets := tuple(sorted(places - {producer_stage})):
                edges.append(Edge(flow.value, producer_stage, targets, flow.bytes, flow.has_gradient))
        members: list[list[int]] = [[] for _ in range(count)]
        for i in range(len(self)):
            members[stage_of[i]].append(i)
        stages = []
        nothing = (0.0,) * len(self)
        host_forward, host_backward = self.host_forward_s or nothing, self.host_backward_s or nothing
        for k, inside in enumerate(members):
            state = round(self.state_per_parameter * weights[k])
            stages.append(
                Stage(
                    calls=tuple(call for i in inside for call in self.units.units[i].calls),
                    forward_s=max(sum(self.forward_s[i] for i in inside), sum(host_forward[i] for i in inside)),
                    backward_s=max(sum(self.backward_s[i] for i in inside), sum(host_backward[i] for i in inside)),
                    saved_bytes=held[k],
                    workspace_bytes=max((self.workspace_bytes[i] for i in inside), default=0),
                    parameter_bytes=weights[k] + fixed[k],
                    gradient_bytes=weights[k],
                    state_bytes=state,
                    optimizer_s=(3 * weights[k] + 2 * state) / self.update_bytes_per_s,
                    update_bytes=update[k],
                )
            )
        return Stages(tuple(stages), tuple(edges), self._ties(stage_of))

    def _ties(self, stage_of: Sequence[int]) -> tuple[Tie, ...]:
        """Trained parameters that units of several stages use, those of the same stages together."""
        found: dict[tuple[int, ...], int] = {}
        for _, nbytes, users in self.parameters:
            places = tuple(sorted({stage_of[u] for u in users}))
            if len(places) > 1:
                found[places] = found.get(places, 0) + nbytes
        return tuple(Tie(places, nbytes) for places, nbytes in sorted(found.items()))


def _part_s(whole_s: float, least_s: float, fraction: float) -> float:
    """Seconds of a part of the batch, of which some are the same for every part.

    >>> _part_s(4.0, 1.0, 0.5), _part_s(4.0, 5.0, 0.5)
    (2.5, 4.0)
    """
    return min(whole_s, least_s) + max(0.0, whole_s - least_s) * fraction


def weigh(graph: Graph, weights: CallWeights, units: Units) -> WeightedUnits:
    """The units of a graph with their weights."""
    calls, rate = [[weights.calls[c] for c in unit.calls] for unit in units.units], weights.parameter_bytes_per_s
    reading: dict[str, set[int]] = {}
    fixed: dict[str, int] = {}
    for i, rows in enumerate(calls):
        for row in rows:
            fixed.update(row.fixed)
            for parameter in (*row.parameters, *row.fixed):
                reading.setdefault(parameter, set()).add(i)
    once_s = [[nbytes / rate for nbytes in _first_read(rows, weights.parameters)] for rows in calls]
    return WeightedUnits(
        units,
        tuple(sum(r.forward_s for r in rows) for rows in calls),
        tuple(sum(r.backward_s for r in rows) for rows in calls),
        tuple(max(r.workspace_bytes for r in rows) for rows in calls),
        merged((p, nbytes, tuple(sorted(reading[p]))) for p, nbytes in fixed.items()),
        _memory_uses(graph, units, calls),
        _flows(graph, units),
        tuple((p, weights.parameters.get(p, 0), tuple(sorted(u))) for p, u in reading.items() if p not in fixed),
        weights.state_per_parameter,
        weights.update_bytes_per_s,
        tuple(sum(map(_fixed_forward_s, rows, once)) for rows, once in zip(calls, once_s, strict=True)),
        tuple(sum(map(_fixed_backward_s, rows, once)) for rows, once in zip(calls, once_s, strict=True)),
        tuple(3 * sum(once) for once in once_s),
        tuple(sum(r.host_forward_s for r in rows) for rows in calls),
        tuple(sum(r.host_backward_s for r in rows) for rows in calls),
        weights.update_workspace,
    )


def _first_read(rows: Sequence[CallWeight], sizes: Mapping[str, int]) -> list[int]:
    """For every call of a unit, the bytes of trained parameters that none before it reads."""
    seen: set[str] = set()
    found = []
    for row in rows:
        found.append(sum(sizes.get(p, 0) for p in {*row.parameters} - seen))
        seen.update(row.parameters)
    return found


def _fixed_forward_s(row: CallWeight, once_s: float) -> float:
    """What a part of the batch takes too; where that is not known, to read the parameters once."""
    return row.fixed_forward_s or once_s


def _fixed_backward_s(row: CallWeight, once_s: float) -> float:
    """The same of backward, which reads parameters and writes their gradients."""
    return row.fixed_backward_s or 2 * once_s


def _flows(graph: Graph, units: Units) -> tuple[ValueFlow, ...]:
    """The values that go from one unit to others, or to the loss."""
    unit_of = units.of_call
    found = []
    for name, value in graph.values.items():
        if value.producer is None:
            continue
        producer, to_loss = unit_of[value.producer], name in graph.outputs
        users = tuple(sorted({unit_of[c] for c in value.consumers if c in unit_of} - {producer}))
        if to_loss or users:
            found.append(ValueFlow(name, value.bytes, producer, users, to_loss, value.requires_grad))
    return tuple(found)


def _memory_uses(graph: Graph, units: Units, calls: Sequence[Sequence[CallWeight]]) -> tuple[SharedMemoryUse, ...]:
    """Every piece of memory with the units that make, read and save it; pieces of the same units are one."""
    touching = _touching(graph, units)
    savers: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for i, rows in enumerate(calls):
        for row in rows:
            for name, nbytes in row.saved.items():
                savers.setdefault(name, set()).add(i)
                sizes[name] = max(nbytes, sizes.get(name, 0))
    outputs = {graph.values[v].base for v in graph.outputs}
    alike: dict[tuple[int, tuple[int, ...], tuple[int, ...], bool], SharedMemoryUse] = {}
    for name in dict.fromkeys((*touching, *savers)):
        producer, found = touching.get(name, (INPUT, set()))
        keeping = savers.get(name, set())
        size = sizes.get(name) or (graph.values[name].bytes if name in graph.values else 0)
        to_loss = name in outputs and producer != INPUT
        if keeping or to_loss or found - {producer}:
            key = (producer, tuple(sorted(found - {producer})), tuple(sorted(keeping)), to_loss)
            # What the same units touch is held by the same stages, however they are cut.
            before = alike[key].bytes if key in alike else 0
            alike[key] = SharedMemoryUse(name if not before else alike[key].name, before + size, *key)
    return tuple(alike.values())


def _touching(graph: Graph, units: Units) -> dict[str, tuple[int, set[int]]]:
    """Memory, by the first value in it -> the unit that makes it, and those that read it or write into it."""
    unit_of = units.of_call
    found: dict[str, tuple[int, set[int]]] = {}
    for value in graph.values.values():
        producer = INPUT if value.producer is None else unit_of[value.producer]
        first, touching = found.setdefault(value.base, (producer, set()))
        touching.update({unit_of[c] for c in value.consumers if c in unit_of}, {producer} - {first})
    return found
