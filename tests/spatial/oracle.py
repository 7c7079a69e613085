"""Plain PyTorch beside the split model, in float64."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import outcore
from outcore.cost.predicted.estimate import estimate
from outcore.machine import parse
from outcore.planner.pipeline.plan_job import weights_on
from outcore.program.simulator.part_time import PartSend, SplitStageCosts
from outcore.spatial.tiles.tile_forecast import TileForecast
from outcore.spatial.tiles.tiled_stage import tiled_stage
from outcore.spatial.virtual import VirtualRanks
from outcore.stream.network import RegionNetwork
from tests.stream.oracle import TOLERANCE, any_excess, total

__all__ = ["TOLERANCE", "assert_messages_are_those_sent", "assert_split_is_plain", "forecast", "messages"]


def assert_split_is_plain(
    model: nn.Module, *inputs: torch.Tensor, grid: tuple[int, ...], most: float = 1.06, **options: Any
) -> VirtualRanks:
    """Loss, every parameter's gradient, the inputs' gradients and all buffers; every message was received."""
    model = model.double()
    plain = copy.deepcopy(model)
    ours = [x.double().clone().requires_grad_() for x in inputs]
    theirs = [x.double().clone().requires_grad_() for x in inputs]
    expected = total(plain(*theirs))
    expected.backward()
    with any_excess(most):
        split = VirtualRanks(model, ours, grid, **options)
        loss = split.step(ours, total)
    torch.testing.assert_close(loss, expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None and other.grad is not None
        assert (mine.grad - other.grad).abs().max() <= TOLERANCE * max(other.grad.abs().max(), 1e-3)
    largest = max((p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None), default=0.0)
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        zero = torch.zeros_like(mine)
        found, wanted = (p.grad if p.grad is not None else zero for p in (mine, other))
        assert (found - wanted).abs().max() <= TOLERANCE * max(largest, 1e-3), name
    for rank, one in enumerate(split.copies):
        for (name, mine), other in zip(one.named_buffers(), plain.buffers(), strict=True):
            if rank == 0 or f"{name.rpartition('.')[0]}#0" in split.calls:  # the rest runs on the first rank
                torch.testing.assert_close(mine, other, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    assert split.ranks is not None and split.ranks.leftovers() == 0
    return split


def forecast(graph: outcore.Graph, split: VirtualRanks, tile: int, *, in_parts: bool = False) -> TileForecast:
    """Of the ranks that ran."""
    machine = parse("v100x4")
    weights = weights_on(machine, graph, estimate(graph, machine), None)
    stage = tiled_stage(RegionNetwork(graph), graph.calls, tile, random=(), in_parts=in_parts)
    return TileForecast(stage, split.grid, weights, in_parts=in_parts)


def messages(costs: SplitStageCosts) -> list[tuple[int, int, int]]:
    """Of a forward and a backward."""
    actions = (*costs.forward, *costs.backward)
    return [message for action in actions if isinstance(action, PartSend) for message in action.messages]


def assert_messages_are_those_sent(split: VirtualRanks, tile: int) -> None:
    """Of a step in tiles, as many and as large as predicted."""
    assert split.ranks is not None
    sent = messages(forecast(split.graph, split, tile).costs())
    assert (len(sent), sum(n for _, _, n in sent)) == (split.ranks.messages, split.ranks.sent_bytes)
