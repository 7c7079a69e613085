"""Tiles of one kind are planned once; what each reads and gives, and who is like whom, is what planning all says."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from outcore.data import Batch, Scene, open_slide, write_slide
from outcore.graph import capture
from outcore.stream import stream
from outcore.stream.execute.tile_dedup import signature
from outcore.stream.plan.prepared import bound, divided
from outcore.stream.plan.tiles import plan_tile
from tests.stream.oracle import any_excess, with_statistics


class Skips(nn.Module):
    """A step down, a step up and a skip around both."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1)
        self.up, self.leave = nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(8, 2, 5, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x).relu()
        return self.leave(torch.cat([x, self.up(self.down(x))], 1))


class Everywhere(nn.Module):
    """A parameter for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.weights = nn.Conv2d(3, 4, 3, padding=1), nn.Parameter(torch.rand(1, 4, 64, 48) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.conv(x) * self.weights).mean((2, 3))


def deep() -> nn.Module:
    steps: list[nn.Module] = []
    for number, (stride, dilation) in enumerate([(1, 1), (2, 1), (1, 2), (3, 1), (1, 1)]):
        steps += [nn.Conv2d(3 if number == 0 else 4, 4, 3, stride, 1, dilation), nn.BatchNorm2d(4), nn.ReLU()]
    return with_statistics(nn.Sequential(*steps, nn.AdaptiveAvgPool2d(1), nn.Flatten())).eval()


NETWORKS = {
    "deep": deep,
    "skips": Skips,
    "pools": lambda: nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.Conv2d(3, 2, 3, padding=1)),
    "resampled": lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(3, 2, 3, padding=1)),
    "odd": lambda: nn.Sequential(nn.Upsample(size=(77, 91), mode="bilinear"), nn.Conv2d(3, 2, 3, padding=1)),
    "reflected": lambda: nn.Sequential(nn.Conv2d(3, 2, 3, padding=1, padding_mode="reflect"), nn.Conv2d(2, 2, 5, 2, 2)),
    "random": lambda: nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.Dropout(0.5)),
}


@pytest.mark.parametrize("most", [1.06, 2.0])
@pytest.mark.parametrize("sides", [(96, 96), (102, 68)])
@pytest.mark.parametrize("name", NETWORKS)
def test_kinds_say_what_planning_every_tile_says(name: str, sides: tuple[int, int], most: float) -> None:
    net = NETWORKS[name]()
    if name == "random":
        net.train()
    with any_excess(most):
        network = bound(capture(net, [(1, 3, *sides)]), folded=True)
        prepared = divided(network, tile=12)
        for stage, cut, kinds in zip(prepared.streaming.stages, prepared.grids, prepared.kinds, strict=True):
            planned = {n: plan_tile(network, stage, cut, n) for n in cut.tiles()}
            tiles = {tile.number: tile for tile in kinds}
            assert tiles.keys() == {n for n, plan in planned.items() if plan is not None}
            looks = {n: signature(stage, plan) for n, plan in planned.items() if plan is not None}
            for number, tile in tiles.items():
                plan = planned[number]
                assert plan is not None
                assert tile.targets == plan.targets
                assert all(plan.regions[v] == tile.regions[v] for v in (*stage.sources, *stage.smalls))
                assert signature(stage, tile.plan) == looks[number]
            for a, b in itertools.combinations(tiles.values(), 2):
                assert a.kind != b.kind or looks[a.number] == looks[b.number]
            if name == "random":
                assert len({t.kind for t in tiles.values()}) == len(tiles)
            elif name in ("deep", "skips"):
                assert len({t.kind for t in tiles.values()}) <= min(len(tiles) - 1, 49)


def test_tiles_of_one_colour_are_not_the_same_where_each_pixel_has_its_parameter() -> None:
    net = Everywhere().double()
    plain, image = copy.deepcopy(net), torch.full((1, 3, 64, 48), 0.5, dtype=torch.float64)
    expected = plain(image)
    expected.square().sum().backward()
    streamed = stream(net, tile=16)
    made = streamed(image)
    made.square().sum().backward()
    assert streamed.counts.forward == 12
    torch.testing.assert_close(made, expected)
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_glass_that_is_known_is_not_read_again(tmp_path) -> None:
    slide = open_slide(write_slide(tmp_path / "s.tif", Scene((512, 384), share=0.2, tile=32)))
    image = Batch((slide.at(level=0),), dtype=torch.float64, mean=(0.8,) * 3)
    net = deep().double()
    plain = copy.deepcopy(net)
    expected = plain(replace(image, sources=(open_slide(tmp_path / "s.tif"),)).tensor())
    expected.square().sum().backward()
    streamed = stream(net, tile=64, workers=2)
    reads = []
    for _ in range(2):
        net.zero_grad()
        made = streamed(image)
        made.square().sum().backward()
        reads.append(len(streamed.counts.reads))
        torch.testing.assert_close(made, expected)
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12)
    assert streamed.counts.reused > 0
    assert reads[1] < reads[0]
