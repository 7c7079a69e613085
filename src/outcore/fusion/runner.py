"""Runs the groups of an array: one after the other, or on a GPU as CUDA graphs, each on a stream of its own.

A step of a small model is hundreds of short kernels, and launching them takes longer than running them. A CUDA graph
holds all of a group's step (forward, backward, clip, optimizer) and launches at once; groups on several streams fill
what one leaves idle. The first steps of a batch shape run eagerly, on the group's stream, which warms up the
libraries; then the step is captured and replayed. They are real training steps, so nothing has to be undone.

Evaluation is captured in the same way, without backward and optimizer. All graphs of a stream share its memory: they
never run at the same time, and none reads what another left behind.

What cannot be captured (a model that asks the GPU for numbers, an optimizer without a fused form, dynamic loss
scales, members with random streams of their own) runs eagerly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outcore.fusion.group import Group, GroupOutcome
from outcore.fusion.program.program import StackedProgram
from outcore.fusion.program.values import Stacked
from outcore.graph.structure import leaves, substitute

_RunKey = tuple[str, Hashable]
""""train" or "look", and the key of the recording."""
_WARM = 2
"""Eager steps before a capture."""


@dataclass(frozen=True, slots=True)
class RunMode:
    """How an array runs."""

    width: int
    """Members per group."""
    graphed: bool = False
    """Each step a CUDA graph."""
    parallel: bool = False
    """Groups at the same time, each on its stream."""
    joined: bool = False
    """All groups in one graph."""
    channels_last: bool = False

    def __str__(self) -> str:
        groups = "fused" if self.width > 1 else "one by one"
        parts = [
            f"{groups}, {self.width} to a group" if self.width > 1 else groups,
            *(["groups on streams"] if self.parallel else []),
            *(["one CUDA graph" if self.joined else "CUDA graphs"] if self.graphed else []),
            *(["channels last"] if self.channels_last else []),
        ]
        return ", ".join(parts)


class GroupRunner:
    """Steps the groups of one array in one way."""

    def __init__(self, groups: Sequence[Group], way: RunMode) -> None:
        self.groups, self.way = list(groups), way
        self.refused: str | None = None
        """Why steps are not captured, if they were meant to be."""
        self._seen: dict[_RunKey, int] = {}
        self._captured: dict[_RunKey, _Captured] = {}
        self._streams: list[Any] = []
        if groups and groups[0].device.type == "cuda" and (way.graphed or way.parallel):
            count = len(groups) if way.parallel else 1
            made = [torch.cuda.Stream(groups[0].device) for _ in range(count)]
            self._streams = [made[i % count] for i in range(len(groups))]
        self._eager_evaluations: set[_RunKey] = set()
        """Evaluations that could not be captured."""
        self._pools: dict[Any, Any] = {}
        """Memory of the graphs, by stream."""
        self._settled = not self._streams

    def step(
        self, key: Hashable, objective: str, program: StackedProgram, args: tuple[Any, ...], own_model: bool
    ) -> list[GroupOutcome]:
        """A training step of all groups."""
        return self._run(("train", key), objective, program, args, own_model)

    def forward(
        self, key: Hashable, objective: str, program: StackedProgram, args: tuple[Any, ...], own_model: bool
    ) -> list[GroupOutcome]:
        """Losses, metrics and outputs of all groups, without training."""
        return self._run(("look", key), objective, program, args, own_model)

    def _run(
        self, key: _RunKey, objective: str, program: StackedProgram, args: tuple[Any, ...], own_model: bool
    ) -> list[GroupOutcome]:
        trains = key[0] == "train"
        if key not in self._eager_evaluations and self._capturable(objective, program, own_model):
            captured = self._captured.get(key)
            if captured is not None and (not trains or captured.arrangement == self._arrangement()):
                return captured.replay(args)
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] > _WARM:
                return self._capture(key, objective, program, args, own_model)
        return self._eager(trains, objective, program, args, own_model)

    def forget(self) -> None:
        """Drop the captured graphs, because something was replaced."""
        self._captured.clear()
        self._seen.clear()
        self._pools.clear()  # they went with the last graph

    def rename(self, keys: Mapping[Any, Hashable]) -> None:
        """Change the keys under which the same steps are asked for."""
        self._captured = {(how, keys.get(key, key)): made for (how, key), made in self._captured.items()}
        self._seen = {(how, keys.get(key, key)): count for (how, key), count in self._seen.items()}
        self._eager_evaluations = {(how, keys.get(key, key)) for how, key in self._eager_evaluations}

    def _arrangement(self) -> list[int]:
        return [stepper.arrangement for group in self.groups for stepper in group.steppers.values()]

    def pool(self, stream: Any) -> Any:
        """The memory that the graphs of a stream share."""
        if stream not in self._pools:
            self._pools[stream] = torch.cuda.graph_pool_handle()
        return self._pools[stream]

    @contextlib.contextmanager
    def beside(self, group: Group) -> Iterator[None]:
        """Run what is inside on a group's stream: libraries keep memory for every stream they were called on."""
        stream = next((s for own, s in zip(self.groups, self._streams, strict=False) if own is group), None)
        if stream is None:
            yield
            return
        self._preallocate()
        here = torch.cuda.current_stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            yield
        here.wait_stream(stream)

    def _eager(
        self, trains: bool, objective: str, program: StackedProgram, args: tuple[Any, ...], own_model: bool
    ) -> list[GroupOutcome]:
        def run(group: Group) -> GroupOutcome:
            do = group.step if trains else group.forward
            return do(objective, program, cut(group, args), own_model=own_model)

        if not self._streams:
            return [run(group) for group in self.groups]
        self._preallocate()
        found = []
        here = torch.cuda.current_stream()
        for group, stream in zip(self.groups, self._streams, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                found.append(run(group))
        for stream in self._streams:
            here.wait_stream(stream)
        return found

    def _preallocate(self) -> None:
        """Let optimizers and cuBLAS allocate the memory that stays before feature maps come and go.

        Allocated in the middle of a step it would be cut from freed blocks of large feature maps, and hold all of them.
        """
        if self._settled:
            return
        self._settled = True
        for group in self.groups:
            for stepper in group.steppers.values():
                stepper.preallocate()
        for stream in dict.fromkeys(self._streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), torch.enable_grad():
                x = torch.ones(16, 16, device=self.groups[0].device, requires_grad=True)
                (x @ x).sum().backward()  # a workspace each for the threads of forward and of backward

    def _capturable(self, objective: str, program: StackedProgram, own_model: bool) -> bool:
        if not self.way.graphed or self.refused is not None or not self._streams:
            return False
        if own_model and program.recording.uses_data:
            self.refused = "the model looks at numbers in tensors"
        if own_model and (program.varying or not program.recording.is_pure):
            self.refused = "the model's code does something else in every call"
        if any(group.steppers[objective].separate_reason for group in self.groups):
            self.refused = self.groups[0].steppers[objective].separate_reason
        if self.groups[0].terms.scale is not None:
            self.refused = "loss scales change with the gradients"
        if self.groups[0].randomness.per_member:
            self.refused = "members draw from streams of their own"
        return self.refused is None

    def _capture(
        self, key: _RunKey, objective: str, program: StackedProgram, args: tuple[Any, ...], own_model: bool
    ) -> list[GroupOutcome]:
        trains = key[0] == "train"
        try:
            made = _Captured(self, trains, objective, program, args, own_model)
        except (RuntimeError, torch.AcceleratorError) as error:
            if trains:
                self.refused = f"capture failed: {str(error).splitlines()[0]}"
            else:
                self._eager_evaluations.add(key)
            torch.cuda.synchronize()
            return self._eager(trains, objective, program, args, own_model)
        self._captured[key] = made
        return made.replay(args)


class _Captured:
    """The step of all groups as CUDA graphs over fixed memory."""

    def __init__(
        self,
        runner: GroupRunner,
        trains: bool,
        objective: str,
        program: StackedProgram,
        args: tuple[Any, ...],
        own_model: bool,
    ) -> None:
        self.groups, self.streams, self.trains, self.objective = runner.groups, runner._streams, trains, objective
        self.args = substitute(args, (Tensor, Stacked), _fixed)
        self.inputs = [_tensor(t) for _, t in leaves(self.args, (Tensor, Stacked))]
        self.graphs: list[Any] = []
        self.outcomes: list[GroupOutcome] = []
        self.names: list[list[str]] = []
        here = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(here)
        torch.cuda.synchronize()
        self.arrangement = runner._arrangement()
        if runner.way.joined:
            self._capture_joined(program, own_model)
        else:
            self._capture_each(program, own_model, runner.pool)

    def _capture_each(self, program: StackedProgram, own_model: bool, pool: Callable[[Any], Any]) -> None:
        for group, stream in zip(self.groups, self.streams, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool(stream), stream=stream):
                self._record(group, program, own_model)
            self.graphs.append(graph)

    def _capture_joined(self, program: StackedProgram, own_model: bool) -> None:
        graph, root = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=root):
            for group, stream in zip(self.groups, self.streams, strict=True):
                stream.wait_stream(root)
                with torch.cuda.stream(stream):
                    self._record(group, program, own_model)
            for stream in self.streams:
                root.wait_stream(stream)
        self.graphs.append(graph)

    def _record(self, group: Group, program: StackedProgram, own_model: bool) -> None:
        part = cut(group, self.args)
        grads: dict[str, Tensor] = {}
        if self.trains:
            outcome, grads = group.compute(self.objective, program, part, own_model=own_model)
            group.update(self.objective, grads)
        else:
            outcome = group.forward(self.objective, program, part, own_model=own_model)
        self.outcomes.append(outcome)
        self.names.append(list(grads))

    def replay(self, args: tuple[Any, ...]) -> list[GroupOutcome]:
        """Copy the batch and every member's hyperparameters to their fixed memory, and run."""
        for target, (_, source) in zip(self.inputs, leaves(args, (Tensor, Stacked)), strict=True):
            target.copy_(_tensor(source), non_blocking=True)
        here = torch.cuda.current_stream()
        if len(self.graphs) == 1:
            for group, names in zip(self.groups, self.names, strict=True):
                self._prepare(group, names)
            self.graphs[0].replay()
        else:
            # A group's graph is launched before the next group is prepared: the device need not wait for the last.
            begun = here.record_event()
            for group, names, graph, stream in zip(self.groups, self.names, self.graphs, self.streams, strict=True):
                with torch.cuda.stream(stream):
                    stream.wait_event(begun)
                    self._prepare(group, names)
                    graph.replay()
            for stream in dict.fromkeys(self.streams):
                here.wait_stream(stream)
        if len(self.outcomes) > 1:
            return self.outcomes  # joined, they are copied
        return [
            GroupOutcome(o.losses.clone(), {n: m.clone() for n, m in o.metrics.items()}, o.output)
            for o in self.outcomes
        ]

    def _prepare(self, group: Group, names: list[str]) -> None:
        if self.trains:
            group.steppers[self.objective].prepare(names)


def cut(group: Group, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The part of per-member batches that is a group's."""
    last = group.first + len(group)
    part: tuple[Any, ...] = substitute(args, Stacked, lambda s: Stacked(s.tensor[group.first : last]))
    return part


def _fixed(value: Tensor | Stacked) -> Tensor | Stacked:
    if isinstance(value, Stacked):
        return Stacked(value.tensor.clone())
    return value.clone()


def _tensor(value: Tensor | Stacked) -> Tensor:
    return value.tensor if isinstance(value, Stacked) else value
