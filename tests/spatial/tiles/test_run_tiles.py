"""Each rank streams its part of the image in tiles: gradients and statistics of plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from outcore.models import UNet
from outcore.spatial.virtual import VirtualRanks
from tests.spatial.test_networks import DeepLab
from tests.stream.oracle import TOLERANCE, total


class Pooled(nn.Module):
    """Batch norms, squeeze-excite, a global pool and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 3, 1), nn.ReLU(), nn.Conv2d(3, 6, 1))
        self.two = nn.Sequential(nn.Conv2d(6, 8, 3, padding=2, dilation=2), nn.BatchNorm2d(8), nn.GELU())
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        y = self.one(x)
        y = self.two(y * torch.sigmoid(self.squeeze(y)))
        return self.head(torch.cat([y.mean((2, 3)), y.amax((2, 3))], 1))


def _compare(model: nn.Module, x: torch.Tensor, grid: tuple[int, ...], tile: int) -> VirtualRanks:
    model = model.double()
    plain = copy.deepcopy(model)
    mine, theirs = (x.double().clone().requires_grad_() for _ in range(2))
    expected = total(plain(theirs))
    expected.backward()
    split = VirtualRanks(model, (mine,), grid, tile=tile)
    loss = split.step((mine,), total)
    torch.testing.assert_close(loss, expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    largest = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, name
        assert (one.grad - other.grad).abs().max() <= TOLERANCE * largest, name
    assert mine.grad is not None and theirs.grad is not None
    assert (mine.grad - theirs.grad).abs().max() <= TOLERANCE * theirs.grad.abs().max()
    streamed = split.prepared[0].streaming.calls
    for rank, one in enumerate(split.copies):
        for (name, ours), other in zip(one.named_buffers(), plain.buffers(), strict=True):
            if rank == 0 or f"{name.rpartition('.')[0]}#0" in streamed:
                torch.testing.assert_close(ours, other, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{rank} {name}")
    assert split.ranks is not None and split.ranks.leftovers() == 0
    return split


@pytest.mark.parametrize(("grid", "tile"), [((2, 2), 16), pytest.param((1, 3), 11, marks=pytest.mark.slow)])
def test_a_global_pool_over_parts_that_are_streamed(grid: tuple[int, ...], tile: int) -> None:
    split = _compare(Pooled(), torch.randn(2, 3, 67, 58), grid, tile)
    assert min(len(p) for p in split.prepared[0].grids) > len(split.grid)  # every rank has several tiles


def test_a_u_net_over_parts_that_are_streamed() -> None:
    _compare(UNet(2, 2, width=2, depth=1), torch.randn(1, 2, 40, 36), (2, 1), 13)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(2, 2), (1, 2), (1, 3)])
def test_a_deeper_u_net_over_parts_that_are_streamed(grid: tuple[int, ...]) -> None:
    _compare(UNet(3, 2, width=3, depth=2), torch.randn(1, 3, 64, 60), grid, 16)


def test_a_map_of_one_pixel_is_one_rank_s() -> None:
    net = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 4, padding=1, dilation=3, bias=False))
    _compare(net, torch.randn(2, 4, 8, 8), (1, 2), 2)


def test_a_map_that_is_resized_from_a_pool_ends_what_is_streamed() -> None:
    split = _compare(DeepLab(), torch.randn(2, 3, 67, 50), (1, 2), 14)
    assert any("not made of tiles" in reason for _, reason in split.prepared[0].streaming.stopped)


def test_more_ranks_than_tiles_leave_some_without_any() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3, padding=1))
    _compare(net, torch.randn(1, 2, 20, 18), (1, 3), 12)
