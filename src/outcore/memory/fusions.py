"""What becomes one operation with its ReLU where results may be reassociated: norms, biases of convolutions, sums.

Each has a file of its own that finds its pairs, says what they are expected to save and how they run. Here they are
chosen together, because all are issued by the same host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from outcore.cost.costs import Costs
from outcore.graph import Graph
from outcore.graph.recording import Step
from outcore.memory.fused_bias import Biases, as_biased, biases_of, rectifiers, worth_it
from outcore.memory.fused_norm import norms_of, replacements
from outcore.memory.fused_sum import Sums, as_summed, summed, sums_of
from outcore.memory.norm_choice import Norms, as_fused, worth_fusing

__all__ = ["Fusions"]


@dataclass(frozen=True)
class Fusions:
    """Pairs of calls that become one operation."""

    norms: Norms = field(default_factory=dict)
    biases: Biases = field(default_factory=dict)
    sums: Sums = field(default_factory=dict)

    @classmethod
    def worth_it(
        cls, graph: Graph, model: nn.Module, costs: Costs, rate: float, device: torch.device, *, issued: bool
    ) -> Fusions:
        """Those that are expected to pay.

        Args:
            graph: the network.
            model: the user's.
            costs: of the graph.
            rate: of the device's memory, in bytes per second.
            device: where the model computes.
            issued: the host issues them one by one; else they are part of a CUDA graph, and its time does not count.
        """
        norms, biases = norms_of(graph, model), biases_of(graph, model, device)
        norms = worth_fusing(norms, costs, rate, issued=issued) if norms else {}
        if biases and not worth_it(biases, as_fused(costs, norms, rate), issued=issued):
            biases = {}
        return cls(norms, biases, sums_of(graph, model, device))

    def expected(self, costs: Costs, rate: float) -> Costs:
        """Costs under them."""
        costs = as_fused(costs, self.norms, rate) if self.norms else costs
        return as_summed(as_biased(costs, self.biases, rate), self.sums)

    def with_state_elsewhere(self) -> Fusions:
        """Those that are left where parameters leave the device: a bias is back for its convolution only."""
        return replace(self, biases={})

    def instead(self, graph: Graph, model: nn.Module, others: Mapping[str, Step], planned: set[str]) -> dict[str, Step]:
        """The steps to run instead of the recorded ones.

        Args:
            graph: the network.
            model: the user's.
            others: steps that are replaced already; their calls are left alone.
            planned: memory that has a policy or is made something from; between two calls that are one there is none.
        """

        def free(name: str, relu: str) -> bool:
            before, after = (graph.values[graph.calls[call].outputs[0]] for call in (name, relu))
            unseen = (after.alias_of or after.name) == before.name or before.name not in planned
            return name not in others and relu not in others and unseen

        biases = {name: relu for name, relu in self.biases.items() if free(name, relu)}
        sums = {name: relu for name, relu in self.sums.items() if name not in others and relu not in others}
        return rectifiers(graph, model, biases) | summed(graph, sums) | replacements(graph, model, self.norms)
