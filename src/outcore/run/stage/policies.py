"""The plan's policies for values, applied inside the stages of a rank.

A stage's part of the network becomes a small graph and recording of its own, and the memory engine runs that in place
of `Part.run`. What enters and leaves a stage belongs to the pipeline and is kept; what lives inside is kept,
recomputed, offloaded or encoded as the plan says. The result of a random call is never recomputed: its seed is set call
by call, of which the memory engine does not know. Nor is that of a synchronised norm: other ranks would have to take
part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch

from outcore.cost.buffers import buffers_of
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.graph import CapturedModule, Graph
from outcore.graph.record.recording import Recording, Step, Tape
from outcore.memory.offload.backends import Backend, tier_for
from outcore.memory.replay.compile_policies import CompiledRecording, prepare
from outcore.memory.replay.replay_forward import ReplayPass
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.script import emit
from outcore.planner.pipeline.stage_policies import rebased
from outcore.program.policies import Policies, Recompute
from outcore.run.stage.stage_module import Part, RandomDraws, Values

_BYTES_PER_S = 1e10
"""For the order of moments alone; nothing is predicted here."""
_AT_ONCE = OffloadTarget(math.inf, math.inf, least_bytes=1)
"""Copies are waited for where they begin: a stage does not know what other ranks have on the link."""
_ROOM = 8
"""Micro-batches whose values may be offloaded at one time."""


class StagePolicies:
    """Runs parts under policies; an `Execute`."""

    def __init__(self, policy: Policies, device: torch.device) -> None:
        self._policy, self._device = policy, device
        self._known: dict[int, tuple[Part, CompiledRecording | None, Backend | None]] = {}

    def __call__(self, part: Part, inputs: Values, draws: RandomDraws) -> Values:
        """Run a part; what autograd would save is treated by its policy."""
        if not torch.is_grad_enabled():
            return part.run(inputs, draws)
        if id(part) not in self._known:
            compiled = self._prepare(part)
            moved = compiled.offloaded_bytes if compiled is not None else 0
            self._known[id(part)] = (part, compiled, tier_for(self._device, _ROOM * moved) if moved else None)
        _, compiled, tier = self._known[id(part)]
        if compiled is None:
            return part.run(inputs, draws)
        with draws.aside():
            values = part.received(inputs)
            passing = ReplayPass(compiled, part, [values[n] for n in part.inputs], tier, partial(_perform, part, draws))
            del values
            made: Values = passing.forward()
            return made

    def _prepare(self, part: Part) -> CompiledRecording | None:
        graph, recording = _as_graph(part)
        policy = {n: how for n, how in self._policy.items() if n in graph.values or n.partition("~")[0] in graph.calls}
        if not policy:
            return None
        costs = account(graph)
        buffers = buffers_of(graph, costs)
        bound = {n for n, b in buffers.items() if part.draws_in(b.writers) or _replaced(part, b.writers)}
        policy = {n: how for n, how in policy.items() if n not in bound or not isinstance(how, Recompute)}
        model = StepModel(graph, by_bytes(costs, _BYTES_PER_S), 0.0, _AT_ONCE)
        compiled = prepare(graph, recording, part, buffers, emit(model, policy))
        return None if compiled.idle else compiled

    def close(self) -> None:
        """Give the memory of offloaded values back."""
        for _, _, tier in self._known.values():
            if tier is not None:
                tier.close()
        self._known.clear()


def _replaced(part: Part, calls: Iterable[str]) -> bool:
    """Whether other ranks take part in one of the calls."""
    return any(part.graph.calls[name].block in part.instead for name in calls)


def _perform(part: Part, draws: RandomDraws, tape: Tape, step: Step) -> None:
    part.perform(tape, step, draws)


def _as_graph(part: Part) -> tuple[Graph, Recording]:
    """A part as a graph that can be run, with all its values named as in the whole."""
    recording = replace(part.recording(), steps=[replace(step) for step in part.recording().steps])
    inside = part.graph.restrict([call for name, call in part.graph.calls.items() if name in part.calls])
    module = CapturedModule(part, lambda *_: recording)
    return replace(inside, values=rebased(inside)[0], executable=(module, recording)), recording
