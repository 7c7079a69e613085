"""Computing one tile."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch

from outcore.graph.recording import Context, Ref
from outcore.ops.region import Region
from outcore.stream.call import Given
from outcore.stream.network import Network, Node
from outcore.stream.rules.border import sliced
from outcore.stream.stages import Stage
from outcore.stream.tiles import TilePlan

__all__ = ["run_tile"]


def run_tile(
    network: Network,
    stage: Stage,
    plan: TilePlan,
    crops: Mapping[str, torch.Tensor],
    state: Mapping[Ref, torch.Tensor],
    given: Given,
) -> dict[str, torch.Tensor]:
    """The values of a tile's targets.

    Args:
        network: the nodes.
        stage: those to run.
        plan: which regions.
        crops: regions of the stage's sources, and its small global values whole.
        state: parameters, buffers and constants.
        given: what rules may look at.
    """
    held: dict[str, torch.Tensor] = dict(crops)
    last = {v: node.output for node in stage.nodes if node.output in plan.needs for v in node.values}
    wanted = {stage.targets[t] for t in plan.targets}
    for node in stage.nodes:
        if (needs := plan.needs.get(node.output)) is None:
            continue
        operands = [
            _operand(ref, region, held, plan.regions, state) for ref, region in zip(node.operands, needs, strict=True)
        ]
        assert node.rule is not None
        with _modes(network, node):
            held[node.output] = node.rule.run(operands, plan.regions[node.output], given)
        del operands
        for value in node.values:
            if last[value] == node.output and value not in wanted:
                held.pop(value, None)
    return {value: held[value] for value in wanted}


def _operand(
    ref: Ref,
    region: Region,
    held: Mapping[str, torch.Tensor],
    regions: Mapping[str, Region],
    state: Mapping[Ref, torch.Tensor],
) -> torch.Tensor:
    if ref.kind == "value":
        return sliced(held[ref.name], regions[ref.name], region)
    tensor = state[ref]
    return sliced(tensor, tuple((0, n) for n in tensor.shape), region)


def _modes(network: Network, node: Node) -> contextlib.AbstractContextManager[object]:
    """The modes that the model itself put this call under, if any."""
    context: Context | None = network.contexts.get(node.call)
    if context is None:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    if not context.grad:
        stack.enter_context(torch.no_grad())
    for device, enabled, dtype in context.autocast:
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
    return stack
