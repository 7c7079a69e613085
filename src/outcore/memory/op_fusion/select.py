"""Which calls are fused where results may be reassociated: norms, biases of convolutions and sums with their ReLU,
layer norms with the casts around them, scaled branches with their sums.

Each has a file of its own that finds its pairs, says what they are expected to save and how they run. Here they are
chosen together, because all are launched by the same host. The last two change which buffers there are, so the network
is rewritten before it is planned (`outcore.memory.op_fusion.rewrite`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from outcore.cost.costs import Costs
from outcore.graph import Graph
from outcore.graph.record.recording import Step
from outcore.memory.op_fusion.add_relu import Sums, as_summed, summed, sums_of
from outcore.memory.op_fusion.batch_norm_relu import norms_of, replacements
from outcore.memory.op_fusion.conv_bias_relu import Biases, as_biased, biases_of, rectifiers, worth_it
from outcore.memory.op_fusion.layer_norm_cast import LayerNorms, layer_norms_of
from outcore.memory.op_fusion.layer_norm_cast import rewrite as rewrite_layer_norms
from outcore.memory.op_fusion.layer_norm_cast import worth_it as layer_norms_worth_it
from outcore.memory.op_fusion.layer_scale import Scales, scales_of
from outcore.memory.op_fusion.layer_scale import rewrite as rewrite_scales
from outcore.memory.op_fusion.layer_scale import worth_it as scales_worth_it
from outcore.memory.op_fusion.profitability import Norms, as_fused, worth_fusing
from outcore.memory.op_fusion.rewrite import Rewrite


@dataclass(frozen=True)
class SelectedFusions:
    """Pairs of calls that become one operation."""

    norms: Norms = field(default_factory=dict)
    biases: Biases = field(default_factory=dict)
    sums: Sums = field(default_factory=dict)
    layer_norms: LayerNorms = field(default_factory=dict)
    scales: Scales = field(default_factory=dict)

    @classmethod
    def worth_it(
        cls, graph: Graph, model: nn.Module, costs: Costs, rate: float, device: torch.device, *, issued: bool
    ) -> SelectedFusions:
        """The fusions that are expected to make a step faster.

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
        found = cls(norms, biases, sums_of(graph, model, device))
        rows = layer_norms_of(graph, model, costs, device)
        if rows:
            rows = layer_norms_worth_it(rows, graph, found._expected(costs, rate), rate, issued=issued)
        found = replace(found, layer_norms=rows)
        scales = {n: row for n, row in scales_of(graph, model, costs, device).items() if n not in found.sums}
        if scales:
            scales = scales_worth_it(scales, graph, found.applied(graph, model, costs, rate)[1], rate, issued=issued)
        return replace(found, scales=scales)

    def sparing(self, named: Collection[str]) -> SelectedFusions:
        """The fusions that keep every buffer with a policy given by hand."""
        rows = {name: norm for name, norm in self.layer_norms.items() if not norm.gone.intersection(named)}
        scales = {name: row for name, row in self.scales.items() if not row.gone.intersection(named)}
        return replace(self, layer_norms=rows, scales=scales)

    @property
    def ab_tested(self) -> bool:
        """Whether a fusion's host time is an estimate, so that the first steps have to decide."""
        return bool(self.norms or self.layer_norms or self.scales)

    def applied(self, graph: Graph, model: nn.Module, costs: Costs, rate: float) -> tuple[Graph, Costs]:
        """The network and its costs with these fusions."""
        if self == SelectedFusions():
            return graph, costs
        to = Rewrite(graph, self._expected(costs, rate))
        rewrite_layer_norms(to, self.layer_norms, model, rate)
        rewrite_scales(to, self.scales, rate)
        return to.result()

    def _expected(self, costs: Costs, rate: float) -> Costs:
        """Costs where steps take less time and nothing else changes."""
        costs = as_fused(costs, self.norms, rate) if self.norms else costs
        return as_summed(as_biased(costs, self.biases, rate), self.sums)

    def with_state_elsewhere(self) -> SelectedFusions:
        """The fusions that work where parameters are offloaded, which are fetched only for the calls that read them."""
        return replace(self, biases={}, scales={})

    def instead(self, graph: Graph, model: nn.Module, others: Mapping[str, Step], planned: set[str]) -> dict[str, Step]:
        """The steps that replace the recorded ones, including those in the rewritten recording.

        Args:
            graph: the network, rewritten.
            model: the user's.
            others: steps that are replaced already; their calls are left as they are.
            planned: buffers that have a policy or are the source of another; no fusion may remove them.
        """

        def free(name: str, relu: str) -> bool:
            before, after = (graph.values[graph.calls[call].outputs[0]] for call in (name, relu))
            unseen = after.base == before.name or before.name not in planned
            return name not in others and relu not in others and unseen

        biases = {name: relu for name, relu in self.biases.items() if free(name, relu)}
        sums = {name: relu for name, relu in self.sums.items() if name not in others and relu not in others}
        found = rectifiers(graph, model, biases) | summed(graph, sums) | replacements(graph, model, self.norms)
        rewritten = {*self.layer_norms, *self.scales, *(call for row in self.scales.values() for call in row.products)}
        return found | {s.name: s for s in graph.recording.steps if s.name in rewritten}
