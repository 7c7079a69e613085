"""Bytes of a step in tiles, found before anything is run."""

from __future__ import annotations

import torch
from torch import nn

import outcore
from outcore.stream.network import RegionNetwork
from outcore.stream.plan.prepared import divided
from outcore.stream.plan.tile_memory import predict_bytes


class Watched(nn.Module):
    """A norm keeps statistics, and nothing reads what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.watch = nn.BatchNorm2d(2), nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        self.watch(y)
        return y.mean((2, 3))


def test_a_network_whose_last_pass_makes_nothing_has_bytes() -> None:
    network = RegionNetwork(outcore.capture(Watched(), torch.randn(1, 2, 8, 8)))
    prepared = divided(network, tile=4, statistics=True)
    assert not prepared.streaming.stages[-1].makes
    assert predict_bytes(prepared).tile_backward >= 2 * 4 * 4 * 4
