"""Some blocks of a graph as a module of their own.

The user's modules are in it under their own names, so its state_dict is a part of the model's; the calls run as they
were recorded. What it needs and what it makes are named values of the graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from outcore.errors import OutcoreError
from outcore.graph.record.recording import Recording, Ref, Tape, schedule_drops
from outcore.graph.structure import leaves

if TYPE_CHECKING:
    from outcore.graph.graph import Graph


class Subgraph(nn.Module):
    """Some calls of a graph: ``subgraph({"conv1#0:out": tensor, ...})`` returns a dictionary of its outputs."""

    inputs: tuple[str, ...]
    """Values it needs."""
    outputs: tuple[str, ...]
    """Values it makes that are used elsewhere."""

    def __init__(self, graph: Graph, model: nn.Module, recording: Recording, calls: set[str]) -> None:
        super().__init__()
        _refuse_torn_memory(graph, calls)
        inside = graph.restrict([call for name, call in graph.calls.items() if name in calls])
        self.inputs, self.outputs = inside.inputs, inside.outputs
        self._shapes = {name: graph.values[name].shape for name in self.inputs}
        # A value of another subgraph must not change there because it is written here.
        self._copied = {v for call in inside.calls.values() for v in call.mutates} & set(self.inputs)
        whole = calls >= graph.calls.keys()  # questions about numbers are asked where all that they need is there
        self._steps = [
            replace(step) for step in recording.steps if step.name in calls or (whole and step.kind == "guard")
        ]
        schedule_drops(self._steps, self.outputs)
        self._constants, self._ambient = recording.constants, recording.ambient
        modules = {step.target for step in self._steps if step.kind == "module"}
        templates = [(step.args, step.kwargs) for step in self._steps]
        modules |= {ref.name for _, ref in leaves(templates, Ref) if ref.kind == "module"}
        for path in sorted(modules):
            _plant_module(self, path, model)
        # In the order of the calls: ranks exchange tensors in the order in which they are found here.
        for name in dict.fromkeys(name for call in inside.calls.values() for name in call.parameters):
            _plant_tensor(self, name, model)
        self.training = model.training

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the calls."""
        if missing := [name for name in self.inputs if name not in inputs]:
            raise OutcoreError(f"missing inputs: {', '.join(missing)}; this subgraph takes {', '.join(self.inputs)}")
        for name, shape in self._shapes.items():
            if (given := tuple(inputs[name].shape)) != shape:
                raise OutcoreError(
                    f"{name} has shape {given}, but the graph was captured with {shape}; capture it for this size"
                )
        values = {name: inputs[name].clone() if name in self._copied else inputs[name] for name in self.inputs}
        tape = Tape(self, self._constants, values)
        tape.run(self._steps, self._ambient)
        return {name: tape.values[name] for name in self.outputs}


def _refuse_torn_memory(graph: Graph, calls: set[str]) -> None:
    """Raise where memory that is written on one side of the cut is read afterwards on the other."""
    for name in calls:
        for written in graph.calls[name].mutates:
            base = graph.values[written].base
            shared = [v for v in graph.values.values() if v.name == base or v.alias_of == base]
            for value in shared:
                late = next((c for c in value.consumers if c not in calls and name in graph.calls[c].after), None)
                if late:
                    raise OutcoreError(
                        f"{name} writes into the memory of {value.name}, which {late} reads afterwards outside of this "
                        "subgraph; put both on the same side"
                    )


def _plant_module(root: nn.Module, path: str, model: nn.Module) -> None:
    """Register a module under its original path, with empty modules on the way."""
    holder, name = _holder(root, path)
    holder._modules[name] = model.get_submodule(path)


def _plant_tensor(root: nn.Module, path: str, model: nn.Module) -> None:
    holder, name = _holder(root, path)
    owner = model.get_submodule(path.rpartition(".")[0])
    if name in owner._parameters:
        holder._parameters.setdefault(name, owner._parameters[name])
    elif name not in holder._buffers:
        holder.register_buffer(name, owner._buffers[name], persistent=name not in owner._non_persistent_buffers_set)


def _holder(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    *way, name = path.split(".")
    for part in way:
        child = root._modules.get(part)
        if child is None:
            child = root._modules[part] = nn.Module()
        root = child
    return root, name
