"""Operations that are easily split wrong, each in a small network of its own, over grids whose cuts fall anywhere.

Whatever a network is made of, it either trains as it does in one process, or what it does not share is run whole and
named before training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.errors import PlanError
from outcore.spatial.extent import split_extent
from outcore.spatial.plan import plan_grid
from outcore.stream.network import RegionNetwork

from .oracle import assert_split_is_plain


class Lambda(nn.Module):
    """Some modules, and a function of them and the image."""

    def __init__(self, function: Callable[..., torch.Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, x):
        return self.function(x, *self.inner)


def _squeeze(x, one, down, up, last):
    y = one(x)
    return last(y * torch.sigmoid(up(F.relu(down(y.mean((2, 3), keepdim=True))))))


def _channel_attention(x, one, query, last):
    """Attention between channels: a product over all pixels."""
    y = one(x)
    q = query(y).flatten(2)
    weights = torch.softmax(q @ y.flatten(2).transpose(1, 2) / y.shape[2], -1)
    return last((weights @ y.flatten(2)).view_as(y) + y)


def _efficient_attention(x, one, last):
    """Average and largest over channels make a gate for every pixel (CBAM)."""
    y = one(x)
    gate = torch.sigmoid(last(torch.cat([y.mean(1, keepdim=True), y.amax(1, keepdim=True)], 1)))
    return y * gate


def _axial_softmax(x, one):
    return torch.softmax(one(x), 3).cumsum(2)


def _window(x, one):
    """A part of the image, cut out."""
    return one(x[:, :, 3:-2, 1:])


def _shifted(x, one):
    return one(x) + torch.roll(x, (2, -3), (2, 3))


def _flipped(x, one):
    return one(x) + one(x.flip(3))


def _padded(x, one):
    return one(F.pad(x, (2, 1, 0, 3), mode="reflect"))


def _negative_padding(x, one):
    return one(F.pad(x, (-2, 1, 3, -1)))


def _positions(x, one):
    """A map of positions, which is not made from the image."""
    rows = torch.linspace(-1, 1, x.shape[2], dtype=x.dtype).view(1, 1, -1, 1).expand(x.shape[0], 1, -1, x.shape[3])
    return one(torch.cat([x, rows], 1))


def _unfold(x, one):
    return F.fold(F.unfold(one(x), 3, padding=1), x.shape[2:], 3, padding=1)


def _grid_sample(x, one):
    at = F.affine_grid(torch.eye(2, 3, dtype=x.dtype).expand(x.shape[0], 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(one(x), at, align_corners=False)


def _whole_norm(x, one):
    y = one(x)
    return y / y.norm()


def _standardised(x, one):
    y = one(x)
    return (y - y.mean()) / (y.std() + 1.0)


def _local_response(x, one):
    return F.local_response_norm(one(x), 3)


def _interpolate(**how) -> Callable[..., torch.Tensor]:
    return lambda x, one, two: two(F.interpolate(one(x), **how))


def _conv(a: int = 4, b: int = 4, k: int = 3, **how) -> nn.Module:
    return nn.Conv2d(a, b, k, **{"padding": k // 2, **how})


TWO = {
    "dilated": nn.Sequential(_conv(dilation=3, padding=3), _conv(dilation=2, padding=0), _conv()),
    "dilated with stride": nn.Sequential(_conv(k=3, dilation=4, padding=5, stride=3), _conv()),
    "transposed with output padding": nn.Sequential(
        _conv(stride=3), nn.ConvTranspose2d(4, 4, 3, 3, 1, output_padding=2), _conv()
    ),
    "transposed, dilated and grouped": nn.Sequential(
        _conv(stride=2), nn.ConvTranspose2d(4, 4, 3, 2, 2, output_padding=1, groups=2, dilation=3), _conv()
    ),
    "transposed with kernel below its stride": nn.Sequential(nn.ConvTranspose2d(4, 4, 2, 3), _conv()),
    "stride above the kernel": nn.Sequential(_conv(k=2, stride=5, padding=0), _conv()),
    "circular": nn.Sequential(_conv(padding_mode="circular"), _conv(k=5, padding_mode="circular"), _conv()),
    "reflect": nn.Sequential(_conv(k=5, padding_mode="reflect"), _conv(padding_mode="replicate")),
    "even kernel, padding same": nn.Sequential(nn.Conv2d(4, 4, 4, padding="same"), _conv(k=5, padding=1)),
    "depthwise separable": nn.Sequential(_conv(groups=4, stride=2), nn.BatchNorm2d(4), nn.Hardswish(), _conv(k=1)),
    "instance norm": nn.Sequential(_conv(), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), _conv()),
    "group norm": nn.Sequential(_conv(), nn.GroupNorm(2, 4), nn.SiLU(), _conv()),
    "pixel shuffle": nn.Sequential(_conv(4, 16), nn.PixelShuffle(2), _conv()),
    "pixel unshuffle": nn.Sequential(_conv(), nn.PixelUnshuffle(2), nn.Conv2d(16, 4, 3, padding=1)),
    "channel shuffle": nn.Sequential(_conv(groups=2), nn.ChannelShuffle(2), _conv(groups=2)),
    "pools with ceil mode": nn.Sequential(
        _conv(), nn.MaxPool2d(3, 2, ceil_mode=True), nn.AvgPool2d(2, 3, 1, True, False), _conv()
    ),
    "dilated pool": nn.Sequential(_conv(), nn.MaxPool2d(3, 2, 1, dilation=2), _conv()),
    "pool by power": nn.Sequential(_conv(), nn.ReLU(), nn.LPPool2d(2, 3, 2), _conv()),
    "adaptive pools": nn.Sequential(_conv(), nn.AdaptiveAvgPool2d((5, 3)), _conv(), nn.AdaptiveMaxPool2d(2)),
    "squeeze and excite": Lambda(_squeeze, _conv(), _conv(4, 2, 1), _conv(2, 4, 1), _conv()),
    "attention between channels": Lambda(_channel_attention, _conv(), _conv(k=1), _conv()),
    "gates of channels": Lambda(_efficient_attention, _conv(), nn.Conv2d(2, 1, 7, padding=3)),
    "softmax over a row": Lambda(_axial_softmax, _conv()),
    "a window": Lambda(_window, _conv()),
    "rolled": Lambda(_shifted, _conv()),
    "flipped": Lambda(_flipped, _conv()),
    "padded by reflection": Lambda(_padded, _conv(padding=0)),
    "negative padding": Lambda(_negative_padding, _conv()),
    "positions": Lambda(_positions, _conv(5, 4)),
    "unfolded": Lambda(_unfold, _conv()),
    "sampled": Lambda(_grid_sample, _conv()),
    "norm of all": Lambda(_whole_norm, _conv()),
    "standardised": Lambda(_standardised, _conv()),
    "response norm": Lambda(_local_response, _conv()),
    "bilinear, corners aligned": Lambda(
        _interpolate(scale_factor=2, mode="bilinear", align_corners=True), _conv(), _conv()
    ),
    "bilinear to a size": Lambda(_interpolate(size=(31, 9), mode="bilinear", align_corners=True), _conv(), _conv()),
    "bilinear, antialiased": Lambda(_interpolate(size=(9, 7), mode="bilinear", antialias=True), _conv(), _conv()),
    "bicubic": Lambda(_interpolate(scale_factor=1.7, mode="bicubic", align_corners=False), _conv(), _conv()),
    "nearest-exact": Lambda(_interpolate(scale_factor=0.6, mode="nearest-exact"), _conv(), _conv()),
    "area": Lambda(_interpolate(size=(10, 8), mode="area"), _conv(), _conv()),
    "spectral norm": nn.Sequential(nn.utils.parametrizations.spectral_norm(_conv()), _conv()),
    "weight norm": nn.Sequential(nn.utils.parametrizations.weight_norm(_conv()), _conv()),
    "one module twice": (lambda c: nn.Sequential(c, nn.ReLU(), c, nn.BatchNorm2d(4), c))(_conv()),
    "frozen first layer": nn.Sequential(_conv().requires_grad_(False), nn.BatchNorm2d(4), _conv()),
    "frozen norm": nn.Sequential(_conv(), nn.BatchNorm2d(4).eval(), _conv()),
    "norm without weights": nn.Sequential(_conv(), nn.BatchNorm2d(4, affine=False, track_running_stats=False), _conv()),
    "PReLU and GLU": nn.Sequential(_conv(4, 8), nn.PReLU(8), nn.GLU(1), _conv()),
}
ONE = {
    "1-D dilated": nn.Sequential(nn.Conv1d(4, 4, 5, padding=8, dilation=4), nn.BatchNorm1d(4), nn.Conv1d(4, 4, 3)),
    "1-D transposed": nn.Sequential(
        nn.Conv1d(4, 4, 3, 3), nn.ConvTranspose1d(4, 4, 4, 3, 1, output_padding=1), nn.InstanceNorm1d(4)
    ),
    "1-D pools": nn.Sequential(nn.Conv1d(4, 4, 3), nn.MaxPool1d(3, 2, 1, ceil_mode=True), nn.AvgPool1d(2), nn.ELU()),
}
THREE = {
    "3-D dilated": nn.Sequential(nn.Conv3d(4, 4, 3, padding=2, dilation=2), nn.GroupNorm(2, 4), nn.Conv3d(4, 4, 2)),
    "3-D transposed": nn.Sequential(
        nn.Conv3d(4, 4, 3, 2, 1), nn.ConvTranspose3d(4, 4, 3, 2, 1, output_padding=1), nn.BatchNorm3d(4)
    ),
    "3-D resized": nn.Sequential(
        nn.Conv3d(4, 4, 3, padding=1),
        nn.Upsample(scale_factor=2, mode="trilinear", align_corners=True),
        nn.MaxPool3d(2),
    ),
}
pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same.:UserWarning")
CUTS_2D = ((), ((0.3,), (0.55,)))


WHOLE = {
    "instance norm": "keeps running statistics",
    "pool by power": "LPPool2d has no rule",
    "adaptive pools": "an adaptive maximum with several bins",
    "attention between channels": "needs all of dimension 3",
    "gates of channels": "amax has no rule",
    "softmax over a row": "needs all of dimension 3",
    "rolled": "roll has no rule",
    "flipped": "flip has no rule",
    "unfolded": "unfold has no rule",
    "sampled": "grid_sample has no rule",
    "norm of all": "norm has no rule",
    "standardised": "std has no rule",
    "bilinear, antialiased": "antialiased interpolation has no rule",
    "spectral norm": "its parameters are parametrised",
    "weight norm": "its parameters are parametrised",
}
"""What runs on the whole image from some block on, and what is said of that block."""


@pytest.mark.parametrize("name", [*TWO, *ONE, *THREE])
def test_what_needs_the_whole_image_is_named_before_training(name: str) -> None:
    net, shape, grid = next(
        (group[name], shape, grid)
        for group, shape, grid in (
            (TWO, (2, 4, 26, 22), (2, 2)),
            (ONE, (2, 4, 61), (3,)),
            (THREE, (2, 4, 12, 9, 13), (2, 1, 2)),
        )
        if name in group
    )
    graph = outcore.capture(copy.deepcopy(net), torch.randn(shape))
    extent = split_extent(RegionNetwork(graph), grid)
    if name not in WHOLE:
        assert not extent.stopped and extent.calls == set(graph.calls)
        return
    assert WHOLE[name] in extent.stopped[0][1]
    if extent.calls:
        assert WHOLE[name] in str(plan_grid(graph, grid, machine="4xv100").why)
    else:
        with pytest.raises(PlanError, match=WHOLE[name]):
            plan_grid(graph, grid, machine="4xv100")


def _check(net: nn.Module, image: torch.Tensor, grid: tuple[int, ...], cuts=(), early=()) -> None:
    torch.manual_seed(0)
    assert_split_is_plain(copy.deepcopy(net), image, grid=grid, cuts=cuts, early=early, most=9.0)


@pytest.mark.slow
@pytest.mark.parametrize("early", [(), None])
@pytest.mark.parametrize("cuts", CUTS_2D, ids=["equal", "unequal"])
@pytest.mark.parametrize("name", TWO)
def test_an_operation_in_two_dimensions_is_plain(name: str, cuts, early) -> None:
    _check(TWO[name], torch.randn(2, 4, 26, 22), (2, 2), cuts, early)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO)
def test_an_operation_over_three_ranks_is_plain(name: str) -> None:
    _check(TWO[name], torch.randn(2, 4, 20, 26), (1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE)
def test_an_operation_in_one_dimension_is_plain(name: str) -> None:
    _check(ONE[name], torch.randn(2, 4, 61), (3,))


@pytest.mark.slow
@pytest.mark.parametrize("name", THREE)
def test_an_operation_in_three_dimensions_is_plain(name: str) -> None:
    _check(THREE[name], torch.randn(2, 4, 12, 9, 13), (2, 1, 2))
