"""A graph that runs: the whole of it, or some of its blocks.

`CapturedModule` replays the recording that fits the call: same shapes, dtypes, flags and modes (`outcore.graph.keys`).
Another key is recorded when it first appears, and kept. `Subgraph` holds some of the user's modules under their own
names and runs the calls that belong to them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outcore.errors import OutcoreError
from outcore.graph.keys import key_of
from outcore.graph.preserve import ModelState
from outcore.graph.recording import Mismatch, Recording, Ref, Step, Tape, schedule_drops
from outcore.graph.structure import leaves

if TYPE_CHECKING:
    from outcore.graph.graph import Graph

__all__ = ["CapturedModule", "Subgraph"]

Recorded = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[Any, Recording, tuple[str, ...]]]


class CapturedModule(nn.Module):
    """The captured model: same results, gradients, buffers, random numbers and state_dict as the original."""

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        recording: Recording,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        record: Recorded,
    ) -> None:
        super().__init__()
        # The model's own dictionaries: one set of parameters, buffers and submodules, whoever looks.
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["model"] = model
        self.recordings: dict[Hashable, list[Recording]] = {}
        self._record = record
        if not recording.volatile:
            self.recordings[key_of(model, args, kwargs)] = [recording]

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The model's own flag."""
        return self.__dict__["model"].training if "model" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "model" in self.__dict__:
            self.__dict__["model"].training = mode

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.model.load_state_dict(*args, **kwargs)

    def recording(self, *args: Any, **kwargs: Any) -> Recording:
        """The recording a call with these arguments would use first; made if there is none."""
        known = self.recordings.setdefault(key_of(self.model, args, kwargs), [])
        if known:
            return known[0]
        made = self._record(self.model, args, kwargs)[1]
        if not made.volatile:
            known.append(made)
        return made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; records first where this key is new."""
        model, tensors = self.model, [t for _, t in leaves((args, kwargs), torch.Tensor)]
        first = self.recording(*args, **kwargs)
        if not (first.uses_data or first.volatile):
            return first.run(model, tensors)
        for recording in self.recordings.get(key_of(model, args, kwargs), ()):
            try:
                return _run_or_restore(recording, model, tensors)
            except Mismatch:
                continue
        fresh = self._record(model, args, kwargs)[1]
        if not fresh.volatile:
            self.recordings[key_of(model, args, kwargs)].append(fresh)
        return fresh.run(model, tensors)


def _run_or_restore(recording: Recording, model: nn.Module, tensors: list[torch.Tensor]) -> Any:
    """Run; if the data leads another way, leave the model as it was."""
    before = ModelState(model, contents=True)
    try:
        return recording.run(model, tensors)
    except Mismatch:
        before.restore()
        raise


class Subgraph(nn.Module):
    """Some calls of a graph as a module: ``subgraph(**inputs)`` returns a dictionary of outputs.

    The user's modules are in it under their own names, so its state_dict is a part of the model's.
    """

    inputs: tuple[str, ...]
    """Values it needs."""
    outputs: tuple[str, ...]
    """Values it makes that are used elsewhere."""

    def __init__(self, graph: Graph, calls: list[str]) -> None:
        super().__init__()
        captured = graph.module
        model = captured.model
        chosen = set(calls)
        inside = graph.restrict([call for name, call in graph.calls.items() if name in chosen])
        self.inputs, self.outputs = inside.inputs, inside.outputs
        self._shapes = {name: graph.values[name].shape for name in self.inputs}
        recording = next(iter(captured.recordings.values()))[0]
        self._check_memory(graph, chosen)
        self._steps = [_copy(step) for step in recording.steps if step.name in chosen]
        schedule_drops(self._steps, self.outputs)
        self._constants, self._ambient = recording.constants, recording.ambient
        self._written = {v for c in inside.calls.values() for v in c.mutates} & set(self.inputs)
        for step in self._steps:
            if step.kind == "module":
                _plant(self, step.target, model.get_submodule(step.target))
        for call in inside.calls.values():
            for name in call.parameters:
                _plant_tensor(self, name, model)
        for _, ref in leaves([(s.args, s.kwargs) for s in self._steps], Ref):
            if ref.kind == "module":
                _plant(self, ref.name, model.get_submodule(ref.name))
        self.train(model.training)

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the calls."""
        if missing := [name for name in self.inputs if name not in inputs]:
            raise OutcoreError(f"missing inputs: {', '.join(missing)}; this subgraph takes {', '.join(self.inputs)}")
        for name, shape in self._shapes.items():
            if tuple(inputs[name].shape) != shape:
                raise OutcoreError(
                    f"{name} has shape {tuple(inputs[name].shape)}, but the graph was captured with {shape}; "
                    "capture the model again for this size"
                )
        values = {name: inputs[name].clone() if name in self._written else inputs[name] for name in self.inputs}
        tape = Tape(self, self._constants, values)
        tape.run(self._steps, self._ambient)
        return {name: tape.values[name] for name in self.outputs}

    def _check_memory(self, graph: Graph, chosen: set[str]) -> None:
        """A value whose memory is written on one side of the cut must not be used on the other."""
        bases: dict[str, set[str]] = {}
        for name, value in graph.values.items():
            bases.setdefault(value.alias_of or name, set()).add(name)
        for name in chosen:
            for written in graph.calls[name].mutates:
                group = bases[graph.values[written].alias_of or written]
                for other in group:
                    late = [c for c in graph.values[other].consumers if c not in chosen and name in graph.calls[c].after]
                    if late:
                        raise OutcoreError(
                            f"{name} writes into the memory of {other}, which {late[0]} reads outside of this subgraph; "
                            "put both on the same side"
                        )


def _copy(step: Step) -> Step:
    return Step(
        step.name, step.kind, step.target, step.args, step.kwargs, step.context, step.outputs, step.rebinds, step.shapes
    )


def _plant(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register a module under its original path, with empty modules on the way."""
    holder, name = _holder(root, path)
    holder._modules[name] = module


def _plant_tensor(root: nn.Module, path: str, model: nn.Module) -> None:
    holder, name = _holder(root, path)
    owner = model.get_submodule(path.rpartition(".")[0])
    if name in owner._parameters:
        holder._parameters.setdefault(name, owner._parameters[name])
    elif name in owner._buffers and name not in holder._buffers:
        holder.register_buffer(name, owner._buffers[name], persistent=name not in owner._non_persistent_buffers_set)


def _holder(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    *way, name = path.split(".")
    for part in way:
        if part not in root._modules:
            root._modules[part] = nn.Module()
        root = root._modules[part]  # type: ignore[assignment]
    return root, name
