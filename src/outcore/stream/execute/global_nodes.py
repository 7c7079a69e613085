"""The global nodes between passes: run once, as they were recorded, with their graph kept for backward.

Squeeze-excite's two layers on the pooled channels, noise that whole samples share, weights made from other weights,
folded batch norms. They use the user's own modules and parameters; backward is autograd's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from outcore.graph.record.recording import Tape
from outcore.ops.region import whole
from outcore.stream.execute.gradient_sums import GradientSums
from outcore.stream.execute.map_store import MapStore
from outcore.stream.network import RegionNetwork, RegionNode

__all__ = ["GlobalNodes"]


@dataclass
class GlobalNodes:
    """What ran between two passes."""

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def run(
        cls,
        network: RegionNetwork,
        nodes: Sequence[RegionNode],
        values: Mapping[str, torch.Tensor],
        wants: Collection[str],
    ) -> GlobalNodes:
        """Run global nodes on finished values, with gradients where the caller has them on."""
        made = {n.output for n in nodes}
        done = cls()
        for name in dict.fromkeys(v for n in nodes for v in n.values if v not in made):
            value = values[name].detach()
            mine = name in wants or name not in network.graph.inputs
            done.inputs[name] = value.requires_grad_() if value.is_floating_point() and mine else value
        tape = Tape(network.model, network.recording.constants, dict(done.inputs))
        steps = {s.name: s for s in network.recording.steps}
        finished: set[str] = set()
        for node in nodes:
            if node.function is not None:
                tensors = [tape.values[r.name] if r.kind == "value" else network.state(r) for r in node.operands]
                tape.values[node.output] = node.function(*tensors)
            elif node.call not in finished:
                finished.add(node.call)
                drop, steps[node.call].drop = steps[node.call].drop, ()
                try:
                    tape.run([steps[node.call]], network.recording.ambient)
                finally:
                    steps[node.call].drop = drop
        done.outputs = {n.output: tape.values[n.output] for n in nodes}
        names = {p for n in nodes if n.function is None for p in network.graph.calls[n.call].parameters}
        found: list[torch.Tensor] = [network.model.get_parameter(p) for p in names if _is_parameter(network, p)]
        found += [network.state(r) for n in nodes if n.function is not None for r in n.operands if r.kind == "state"]
        done.parameters = list({id(p): p for p in found if p.requires_grad}.values())
        return done

    def backward(self, store: MapStore, sums: GradientSums) -> None:
        """Backward from the gradients of the outputs to those of the inputs and parameters."""
        outputs = [(t, store.gradients[n]) for n, t in self.outputs.items() if n in store.gradients and t.requires_grad]
        leaves = {n: t for n, t in self.inputs.items() if t.requires_grad}
        wanted = [*leaves.values(), *self.parameters]
        if not outputs or not wanted:
            return
        found = torch.autograd.grad(
            [t for t, _ in outputs],
            wanted,
            [g.to(t.dtype) for t, g in outputs],
            allow_unused=True,
            retain_graph=True,
        )
        for (name, leaf), part in zip(leaves.items(), found, strict=False):
            if part is not None:
                store.add_gradient(name, tuple(leaf.shape), whole(leaf.shape), part)
        sums.add(self.parameters, found[len(leaves) :])


def _is_parameter(network: RegionNetwork, name: str) -> bool:
    holder, _, last = name.rpartition(".")
    return last in network.model.get_submodule(holder)._parameters
