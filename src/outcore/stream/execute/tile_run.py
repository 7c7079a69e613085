"""Computing one tile.

One value may be read by several nodes at different regions (`fork`). autograd would make, for every region, a gradient
of the whole value filled with zeros, and add them up: three passes over memory for a skip connection that is one pixel
narrower than the value. Here the regions are made together, and in backward the smaller gradients are added into the
one that covers the whole.

Regions keep the value's memory format, which needs care: of a batch of one that is stored channels last, `view_as`
makes a view whose strides are no longer taken for channels last, and pools and concatenations would convert it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from outcore.graph.record.numeric_settings import under_settings, with_changes
from outcore.graph.record.recording import Context, Ref
from outcore.ops.region import Region
from outcore.stream.call import RuleContext, widening_rule
from outcore.stream.execute.map_store import memory_format
from outcore.stream.network import RegionNetwork
from outcore.stream.plan.passes import TilePass
from outcore.stream.plan.tiles import TilePlan
from outcore.stream.rules.border import sliced
from outcore.stream.rules.convolve import ConvolutionRule
from outcore.stream.rules.pool import MaxPool


def run_tile(
    network: RegionNetwork,
    stage: TilePass,
    plan: TilePlan,
    crops: Mapping[str, torch.Tensor],
    state: Mapping[Ref, torch.Tensor],
    given: RuleContext,
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
    readers = _readers(stage, plan)
    handed: dict[tuple[str, int], torch.Tensor] = {}
    wanted = {stage.targets[t] for t in plan.targets}
    last = {v: node.output for node in stage.nodes if node.output in plan.needs for v in node.values}
    for node in stage.nodes:
        if (needs := plan.needs.get(node.output)) is None:
            continue
        operands = []
        for i, (ref, region) in enumerate(zip(node.operands, needs, strict=True)):
            if ref.kind != "value":
                tensor = state[ref]
                operands.append(sliced(tensor, tuple((0, n) for n in tensor.shape), region))
            elif len(readers[ref.name]) == 1 or ref.name in wanted or not held[ref.name].requires_grad:
                operands.append(sliced(held[ref.name], plan.regions[ref.name], region))
            else:
                if (node.output, i) not in handed:
                    handed.update(_hand_out(ref.name, held, plan, readers[ref.name]))
                operands.append(handed.pop((node.output, i)))
        assert node.rule is not None
        with modes(network.contexts.get(node.call)):
            widened, wide = plan.widened.get(node.output), widening_rule(node.rule)
            if widened is not None and wide is not None:
                held[node.output] = wide.run_widened(operands, widened)
            else:
                held[node.output] = node.rule.run(operands, plan.regions[node.output], given)
        del operands
        for value in node.values:
            if last[value] == node.output and value not in wanted:
                held.pop(value, None)
    return {value: held[value] for value in wanted}


_Reader = tuple[str, int, Region, bool]
"""Node, number of the operand, region, and whether its gradient is fresh."""


def _readers(stage: TilePass, plan: TilePlan) -> dict[str, list[_Reader]]:
    """The readers of each value, in order."""
    found: dict[str, list[_Reader]] = {}
    for node in stage.nodes:
        for i, (ref, region) in enumerate(zip(node.operands, plan.needs.get(node.output, ()), strict=False)):
            if ref.kind == "value":
                fresh = i == 0 and isinstance(node.rule, (ConvolutionRule, MaxPool))
                found.setdefault(ref.name, []).append((node.output, i, region, fresh))
    return found


def _hand_out(
    name: str, held: Mapping[str, torch.Tensor], plan: TilePlan, readers: list[_Reader]
) -> dict[tuple[str, int], torch.Tensor]:
    parts = fork(held[name], plan.regions[name], [r for _, _, r, _ in readers], [f for _, _, _, f in readers])
    return {(output, i): part for (output, i, _, _), part in zip(readers, parts, strict=True)}


def modes(context: Context | None) -> contextlib.AbstractContextManager[object]:
    """The modes that the model itself put a call under, if any."""
    if context is None:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    if not context.grad:
        stack.enter_context(torch.no_grad())
    for device, enabled, dtype in context.autocast:
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
    if context.settings:
        stack.enter_context(under_settings(with_changes(context.settings)))
    return stack


def fork(
    value: torch.Tensor, held: Region, regions: Sequence[Region], fresh: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """The regions of a value of which another region is held.

    Args:
        value: what is held.
        held: its region.
        regions: what is wanted, one per reader.
        fresh: whether the reader's gradient is a tensor that nobody else has, and may be added to.
    """
    made: tuple[torch.Tensor, ...] = _Fork.apply(value, held, tuple(regions), tuple(fresh))  # type: ignore[no-untyped-call]
    return made


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, held: Region, regions: tuple[Region, ...], fresh: tuple[bool, ...]
    ) -> tuple[torch.Tensor, ...]:
        ctx.held, ctx.regions, ctx.fresh = held, regions, fresh
        ctx.shape, ctx.format = value.shape, memory_format(value)
        ctx.set_materialize_grads(False)
        parts = (sliced(value, held, region) for region in regions)
        return tuple(part.narrow(0, 0, part.shape[0]) for part in parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        there = [i for i, g in enumerate(gradients) if g is not None]
        if not there:
            return None, None, None, None
        wholes = [i for i in there if ctx.regions[i] == ctx.held]
        first = next((i for i in wholes if ctx.fresh[i]), wholes[0] if wholes else None)
        if first is None:
            first = there[0]
            some = gradients[first]
            assert some is not None
            total = torch.empty(ctx.shape, dtype=some.dtype, device=some.device, memory_format=ctx.format).zero_()
            sliced(total, ctx.held, ctx.regions[first]).copy_(some)
        else:
            chosen = gradients[first]
            assert chosen is not None
            total = chosen if ctx.fresh[first] or len(there) == 1 else chosen.clone()
        for i in there:
            part = gradients[i]
            if i != first and part is not None:
                sliced(total, ctx.held, ctx.regions[i]).add_(part)
        return total, None, None, None
