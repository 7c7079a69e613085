"""A form: the network recorded for one shape of micro-batch in one mode, with the parts that are on this rank.

Recordings are keyed by shapes, dtypes, training flags and what else they read from Python
(`outcore.graph.record.captured_module`); another key is another form, recorded when it first appears and kept. Names of
values and calls are the same in all forms, so one program runs micro-batches of different sizes, and the program of a
plan made for one batch size runs another. In eval mode a model may call other functions than in training; calls that
training does not know go where their inputs are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outcore.errors import CaptureError, PlanError
from outcore.graph import Graph, capture
from outcore.graph.parts import ancestors
from outcore.graph.random_calls import random_calls
from outcore.graph.reads.attributes import copy_attributes
from outcore.graph.reads.snapshot import Snapshot
from outcore.graph.record.captured_module import RecordingVersions, refuse_volatile
from outcore.graph.structure import substitute
from outcore.program import Edge, Stage, Stages, Tie
from outcore.program.plan.document import Plan
from outcore.program.plan.stage_names import place_calls
from outcore.run.engine.batch import arguments, describe, fingerprint
from outcore.run.stage.stage_module import Part
from outcore.run.transport.p2p import TensorLayout


class RecordedStages:
    """The network recorded for one shape of micro-batch in one mode, cut into stages."""

    def __init__(
        self,
        graph: Graph,
        model: nn.Module,
        stage_of: Mapping[str, int],
        own: Iterable[int],
        device: torch.device,
        depth: int,
    ) -> None:
        recorded, self.recording = graph.module.model, graph.recording
        self.graph, self.stage_of = graph, stage_of
        self.reads: Snapshot | None = None
        """The Python state of the model that its recording has read."""
        random = random_calls(graph)
        self.parts: dict[int, Part] = {}
        for stage in own:
            calls = {name for name, k in stage_of.items() if k == stage}
            part = self.parts[stage] = Part(graph, model, self.recording, calls, random)
            if device.type != "cpu" or recorded is not model:
                part.relocate(device)
        self.layouts = {name: TensorLayout.of(value) for name, value in graph.values.items()}
        self.last = depth - 1
        self.edges = tuple(replace(edge, bytes=0) for edge in edges_of(graph, stage_of, depth))
        """The values that cross between stages; sizes are in the layouts."""

    def needs_inputs(self, stage: int) -> bool:
        """Whether a stage reads inputs of the model."""
        of_loss = stage == self.last and any(name in self.graph.inputs for name in self.graph.outputs)
        return of_loss or any(
            self.stage_of[call] == stage for name in self.graph.inputs for call in self.graph.values[name].consumers
        )


class RecordedStagesByShape:
    """All forms of a model that were needed so far.

    `model` holds the weights of this rank's stages; `skeleton` is what is recorded: the model itself, or the same model
    on the meta device, so that no rank needs all the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        skeleton: nn.Module,
        plan: Plan,
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> None:
        self.model, self.skeleton = model, skeleton
        self.plan, self.device, self.autocast = plan, device, autocast
        self.own: tuple[int, ...] = ()
        self._known: dict[tuple[Any, ...], RecordedStages] = {}
        self._versions = RecordingVersions()
        self._reads: Snapshot | None = None
        self._modules: list[nn.Module] | None = None  # in order; none is added while an engine runs
        self._stage_of: dict[str, int] = {}

    def first(self, graph: Graph) -> Stages:
        """Check the plan against a first recording, made in training, and say what its stages are."""
        self._stage_of = place_calls(graph, self.plan.stages)
        self._graph = graph
        depth = len(self.plan.stages)
        sizes = {n: p.numel() * p.element_size() for n, p in self.skeleton.named_parameters(remove_duplicate=False)}
        trained = {n for n, p in self.skeleton.named_parameters(remove_duplicate=False) if p.requires_grad}
        first = {id(p): n for n, p in reversed([*self.skeleton.named_parameters(remove_duplicate=False)])}
        one_name = {n: first[id(p)] for n, p in self.skeleton.named_parameters(remove_duplicate=False)}
        stages, places = [], dict[str, list[int]]()
        for k in range(depth):
            calls = tuple(c for c, stage in self._stage_of.items() if stage == k)
            held = {one_name[p] for c in calls for p in graph.calls[c].parameters if p in sizes}
            for name in held & trained:
                places.setdefault(name, []).append(k)
            weights = sum(sizes[p] for p in held)
            stages.append(Stage(calls, 0.0, 0.0, 0, 0, weights, sum(sizes[p] for p in held & trained), 0))
        tied: dict[tuple[int, ...], int] = {}
        for name, several in places.items():
            if len(several) > 1:
                tied[tuple(several)] = tied.get(tuple(several), 0) + sizes[name]
        ties = tuple(Tie(several, nbytes) for several, nbytes in sorted(tied.items()))
        return Stages(tuple(stages), edges_of(graph, self._stage_of, depth), ties)

    @property
    def stage_of(self) -> Mapping[str, int]:
        """The stage of every call in training."""
        return self._stage_of

    def record(self, inputs: Any) -> Graph:
        """The graph for inputs, real or meta, in the modes the model is in."""
        if self.skeleton is not self.model:
            _copy_flags(self.model, self.skeleton)
            inputs = substitute(inputs, torch.Tensor, lambda t: t.to("meta"))
        else:  # one stage, which may look at numbers: where its weights are
            inputs = substitute(inputs, torch.Tensor, lambda t: t if t.is_meta else t.to(self.device))
        args, kwargs = arguments(inputs)
        with self.modes("cpu" if self.skeleton is not self.model else None):
            try:
                return capture(self.skeleton, args, kwargs)
            except CaptureError as error:
                if self.skeleton is self.model:
                    raise
                said = str(error).partition("; and there are no weights")[0]
                raise CaptureError(
                    f"{said}; a network that is cut into stages is recorded without weights, so it may neither look at "
                    "numbers nor make tensors on a device that it names; use a plan of one stage"
                ) from error

    def modes(self, device: str | None = None) -> contextlib.AbstractContextManager[Any]:
        """The autocast that forwards run under."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device or self.device.type, dtype=self.autocast)

    def keep(self, form: RecordedStages, inputs: Any) -> None:
        """Use a form for micro-batches like these, in the modes the model is in."""
        self._keep(form, self._versions.find((fingerprint(describe(inputs)), True, self.flags())))

    def _keep(self, form: RecordedStages, key: tuple[Any, ...]) -> None:
        refuse_volatile(form.recording, "an Engine")
        self._known[key] = form
        assert form.recording.reads is not None
        form.reads = form.recording.reads.moved(self.skeleton, self.model)
        self._reads = self._reads or form.reads
        for old in self._versions.add(key, form.reads):
            self._known.pop(old, None)

    def flags(self) -> tuple[Any, ...]:
        """The Python state of the model that a recording depends on, read at every step."""
        if self._modules is None:
            self._modules = list(self.model.modules())
        trained = (p.requires_grad for m in self._modules for p in m._parameters.values() if p is not None)
        return tuple(module.training for module in self._modules), tuple(trained)

    def find(self, inputs: Any, flags: tuple[Any, ...], *, training: bool) -> RecordedStages:
        """The form for a micro-batch in the modes the model is in (`flags`); recorded now if it is new."""
        key = self._versions.find((fingerprint(describe(inputs)), training, flags))
        form = self._known.get(key)
        if self._reads is not None and (form is None or form.reads is None or form.reads.renewed):
            self._reads.refuse_replaced("an Engine")
        if form is None:
            with torch.set_grad_enabled(training):
                graph = self.record(inputs)
            if len(self.plan.stages) > 1 and graph.recording.uses_data:
                raise PlanError(
                    f"{graph.root.type} looks at the numbers in its tensors ({'; '.join(graph.notes)}), so it cannot "
                    "be cut; use a plan of one stage"
                )
            stage_of = place_like(graph, self._graph, self._stage_of)
            form = RecordedStages(graph, self.model, stage_of, self.own, self.device, len(self.plan.stages))
            self._keep(form, key)
        if form.recording.effects is not None:
            form.recording.effects.apply_plain(self.model, "an Engine")
        return form


def edges_of(graph: Graph, stage_of: Mapping[str, int], depth: int) -> tuple[Edge, ...]:
    """The values that cross from stage to stage; outputs of the model go to the last, where the loss is."""
    edges = []
    for name, value in graph.values.items():
        if value.producer is None:
            continue
        producer = stage_of[value.producer]
        places = {stage_of[c] for c in value.consumers} | ({depth - 1} if name in graph.outputs else set())
        if targets := tuple(sorted(places - {producer})):
            edges.append(Edge(name, producer, targets, value.bytes, value.requires_grad))
    return tuple(edges)


def _copy_flags(model: nn.Module, skeleton: nn.Module) -> None:
    for mine, theirs in zip(model.modules(), skeleton.modules(), strict=True):
        theirs.training = mine.training
    copy_attributes(model, skeleton)
    for here, there in zip(model.parameters(), skeleton.parameters(), strict=True):
        there.requires_grad_(here.requires_grad)


def place_like(graph: Graph, first: Graph, known: Mapping[str, int]) -> dict[str, int]:
    """The stage of every call, as in a first recording of the same model.

    A call that is new goes where its parameters are, else where the calls of the block around it are, never before
    those that make its inputs.
    """
    readers: dict[str, int] = {}
    inside: dict[str, int] = {}
    for name, call in first.calls.items():
        for parameter in call.parameters:
            readers.setdefault(parameter, known[name])
        for path in (*ancestors(call.block), call.block):
            inside.setdefault(path, known[name])
    stage_of: dict[str, int] = {}
    for name, call in graph.calls.items():
        before = [stage_of[p] for v in call.inputs if (p := graph.values[v].producer) is not None]
        if name in known:
            here = [known[name]]
        elif read := [readers[p] for p in call.parameters if p in readers]:
            here = read[:1]
        else:
            here = [inside[p] for p in reversed(ancestors(call.block)) if p in inside][:1]
        stage_of[name] = max([0, *here, *before])
    return stage_of
