"""What is predicted of ranks that stream their parts, against what they do: every message, and its bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import PlanError
from outcore.models import UNet
from outcore.program.simulator.part_time import PartCompute
from outcore.spatial.tiles.tiled_stage import tiled_stage
from outcore.spatial.virtual import VirtualRanks
from outcore.stream.network import RegionNetwork
from tests.spatial.oracle import assert_messages_are_those_sent, forecast, messages
from tests.spatial.test_networks import DeepLab
from tests.stream.oracle import total

from .test_run_tiles import Pooled

CASES = {
    "a global pool": (Pooled, (2, 3, 67, 58), (2, 2), 16),
    "a U-Net": (lambda: UNet(2, 2, width=2, depth=1), (1, 2, 40, 36), (2, 1), 13),
    "a pool that ends what is streamed": (DeepLab, (2, 3, 67, 50), (1, 2), 14),
    "ranks without tiles": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3, padding=1)),
        (1, 2, 20, 18),
        (1, 3),
        12,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_message_is_foreseen_with_its_bytes(name: str) -> None:
    make, shape, grid, tile = CASES[name]
    torch.manual_seed(0)
    net, x = make().double(), torch.randn(*shape, dtype=torch.float64)
    split = VirtualRanks(net, (x,), grid, tile=tile)
    split.step((x,), total)
    assert_messages_are_those_sent(split, tile)


def test_tiles_of_all_ranks_take_what_those_of_one_take() -> None:
    net, x = UNet(2, 2, width=2, depth=1), torch.randn(1, 2, 64, 64)
    seconds = []
    for grid in ((1, 1), (2, 2)):
        split = VirtualRanks(net, (x,), grid, tile=16)
        costs = forecast(split.graph, split, 16).costs()
        ways = (
            sum(sum(a.seconds) for a in way if isinstance(a, PartCompute)) for way in (costs.forward, costs.backward)
        )
        seconds.append(tuple(ways))
    assert seconds[1] == pytest.approx(seconds[0]) and min(seconds[0]) > 0
    assert forecast(split.graph, split, 16).tiles == (4 * len(split.prepared[0].streaming.stages),) * 4


def test_a_loss_in_parts_is_all_in_forward_and_leaves_no_map_to_put_together() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3, padding=1))
    split = VirtualRanks(net, (torch.randn(1, 2, 32, 32),), (1, 2), tile=16)
    whole, parts = (forecast(split.graph, split, 16, in_parts=way).costs() for way in (False, True))
    assert not parts.backward and whole.backward
    assert sum(n for _, _, n in messages(parts)) < sum(n for _, _, n in messages(whole)) / 5
    assert max(part.peak for part in parts.memory) < whole.memory[0].peak
    half = forecast(split.graph, split, 16, in_parts=True).costs(0.5)
    assert half.memory[0].peak == pytest.approx(parts.memory[0].peak / 2, abs=1)
    assert len(messages(half)) == len(messages(parts)) and half.forward[0] != parts.forward[0]


def test_the_first_rank_holds_the_boundary_too() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1))
    split = VirtualRanks(net, (torch.randn(1, 2, 32, 32),), (1, 2), tile=16)
    first, other = forecast(split.graph, split, 16).costs().memory
    assert first.held - other.held == 2 * 32 * 32 * 4 and first.peak > other.peak


def test_what_cannot_be_streamed_is_refused_by_name() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(3, 2, 3, padding=1))
    graph = outcore.capture(net, torch.randn(1, 2, 32, 32))
    network = RegionNetwork(graph)
    with pytest.raises(PlanError, match="draws random numbers"):
        tiled_stage(network, graph.calls, 8, random={"1#0"}, in_parts=False)
    with pytest.raises(PlanError, match="2#0, which is in a later stage"):
        tiled_stage(network, set(graph.calls) - {"2#0"}, 8, random=(), in_parts=False)
    headed = outcore.capture(nn.Sequential(net, nn.AdaptiveAvgPool2d(1)), torch.randn(1, 2, 32, 32))
    with pytest.raises(PlanError, match="does not return one map"):
        tiled_stage(RegionNetwork(headed), headed.calls, 8, random=(), in_parts=True)
