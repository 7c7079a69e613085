"""Random networks over random grids: any DAG of what people build, any size, parts of any size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from outcore.errors import StreamError
from tests.stream.oracle import with_statistics

from .oracle import assert_messages_are_those_sent, assert_split_is_plain

_BORDERS = ("zeros", "zeros", "reflect", "replicate", "circular")
_OTHERS = ["up", "max", "unpool", "average", "resize", "norm", "norm", "group", "instance", "act"]
_C = 4


class Dag(nn.Module):
    """Layers of which each reads some earlier value; joined, added or gated with another one, resized if it must be."""

    def __init__(self, layers: list[nn.Module], sources: list[int], joins: list[tuple[str, int]], end: str) -> None:
        super().__init__()
        self.layers, self.sources, self.joins, self.end = nn.ModuleList(layers), sources, joins, end
        self.mix = nn.ModuleList(nn.Linear(2 * _C, _C) for _ in layers)

    def forward(self, x):
        seen = [x * 1]
        for layer, source, (how, other), mix in zip(self.layers, self.sources, self.joins, self.mix, strict=True):
            y = layer(seen[source % len(seen)])
            if how != "none":
                y = self._join(y, seen[other % len(seen)], how, mix)
            seen.append(y)
        y = seen[-1]
        if self.end == "mean":
            return y.mean(list(range(2, y.dim())))
        if self.end == "max":
            return y.amax(list(range(2, y.dim()))) + F.adaptive_max_pool1d(y.flatten(2), 1).squeeze(-1)
        if self.end == "flat":
            return torch.tanh(y.flatten(1)).cumsum(1)
        if self.end == "two":
            return y, seen[len(seen) // 2].mean(-1), F.softmax(y, 1)
        return y

    def _join(self, y, other, how, mix):
        pixels = list(range(2, y.dim()))
        if how == "gate":
            scale = torch.sigmoid(F.linear(other.mean(pixels), mix.weight[:, :_C], mix.bias))
            return y * scale.reshape(*scale.shape, *(1,) * len(pixels))
        other = F.interpolate(other, y.shape[2:], mode="nearest")
        if how == "add":
            return y + other
        joined = torch.cat([y, other], 1).movedim(1, -1)
        return mix(joined).movedim(-1, 1)


class Unpooled(nn.Module):
    """Positions of maxima travel beside their values, which change before they are put back."""

    def __init__(self, dims: int, kernel: int) -> None:
        super().__init__()
        self.pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dims - 1](kernel, return_indices=True)
        self.unpool = (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)[dims - 1](kernel)
        self.conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](_C, _C, 3, padding=1)

    def forward(self, x):
        pooled, positions = self.pool(x)
        return self.unpool(self.conv(pooled), positions)


@st.composite
def layers(draw, dims: int, norms: bool) -> nn.Module:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    up = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    kind = draw(st.sampled_from(["conv"] * 4 + _OTHERS))
    kernel = draw(st.integers(1, 4 if dims < 3 else 3))
    if kind == "conv":
        border = draw(st.sampled_from(_BORDERS))
        groups = draw(st.sampled_from([1, 1, 2, _C]))
        stride, dilation, padding = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 3))
        return conv(_C, _C, kernel, stride, padding, dilation, groups, draw(st.booleans()), border)
    if kind == "up":
        stride = draw(st.integers(1, 3))
        return up(_C, _C, kernel, stride, draw(st.integers(0, (kernel - 1) // 2)), draw(st.integers(0, stride - 1)))
    if kind == "max":
        pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dims - 1]
        return pool(kernel, draw(st.integers(1, 3)), kernel // 2, ceil_mode=draw(st.booleans()))
    if kind == "unpool":
        return Unpooled(dims, draw(st.integers(1, 3)))
    if kind == "average":
        average = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[dims - 1]
        return average(kernel, draw(st.integers(1, 3)), kernel // 2, draw(st.booleans()), draw(st.booleans()))
    if kind == "resize":
        smooth = ("linear", "bilinear", "trilinear")[dims - 1]
        mode = draw(st.sampled_from(["nearest", smooth]))
        align = draw(st.booleans()) if mode != "nearest" else None
        return nn.Upsample(scale_factor=draw(st.sampled_from([2, 1.5, 0.6])), mode=mode, align_corners=align)
    if kind == "norm":
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        momentum = draw(st.sampled_from([0.1, None]))
        return with_statistics(norm(_C, momentum=momentum)).train(norms)
    if kind == "group":
        return nn.GroupNorm(draw(st.sampled_from([1, 2, _C])), _C)
    if kind == "instance":
        instance = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
        return instance(_C, affine=draw(st.booleans()))
    return draw(st.sampled_from([nn.GELU(), nn.ELU(inplace=True), nn.PReLU(_C), nn.Identity()]))


def one_network(data: st.DataObject, dims: int, seed: int, *, tiles: bool = False) -> None:
    torch.manual_seed(seed)
    count = data.draw(st.integers(1, 6 if dims < 3 else 3))
    norms = data.draw(st.booleans())
    made = [data.draw(layers(dims, norms)) for _ in range(count)]
    sources = [data.draw(st.sampled_from([-1, -1, -1, 0, 1])) for _ in range(count)]
    for layer, source in zip(made, sources, strict=True):
        if isinstance(layer, nn.ELU) and source != -1:
            layer.inplace = False
    joins = [
        (data.draw(st.sampled_from(["none", "none", "add", "cat", "gate"])), data.draw(st.integers(0, 6)))
        for _ in range(count)
    ]
    if any(how != "none" for how, _ in joins):
        for layer in made:
            if isinstance(layer, nn.ELU):
                layer.inplace = False
    net = Dag(made, sources, joins, data.draw(st.sampled_from(["map", "map", "mean", "max", "flat", "two"])))
    largest = {1: 60, 2: 24, 3: 9}[dims]
    x = torch.randn(2, _C, *(data.draw(st.integers(4, largest)) for _ in range(dims)))
    grid = tuple(data.draw(st.integers(1, 3 if dims < 3 else 2)) for _ in range(dims))
    cuts: tuple[tuple[float, ...], ...] = ()
    if data.draw(st.booleans()):
        cuts = tuple(
            tuple(sorted(data.draw(st.lists(st.floats(0.05, 0.95), min_size=n - 1, max_size=n - 1, unique=True))))
            for n in grid
        )
    try:
        out = net.double()(x.double())
    except (RuntimeError, ValueError):  # it shrank to nothing, or a border is wider than the image
        return
    if any(not torch.isfinite(t).all() for t in (out if isinstance(out, tuple) else (out,))):
        return
    if tiles:
        assert_tiles_are_plain(net, x, grid, cuts, data.draw(st.integers(2, largest // 2)))
        return
    early = data.draw(st.sampled_from([(), None]))
    assert_split_is_plain(net, x, grid=grid, cuts=cuts, early=early, most=data.draw(st.sampled_from([1.0, 1.06, 9.0])))


def assert_tiles_are_plain(net: nn.Module, x: torch.Tensor, grid, cuts, tile: int) -> None:
    """The same where each rank streams its part; what cannot be streamed at all is refused."""
    try:
        split = assert_split_is_plain(net, x, grid=grid, cuts=cuts, tile=tile)
    except StreamError as refused:
        assert "nothing" in str(refused) or "tile" in str(refused), refused
    else:
        assert_messages_are_those_sent(split, tile)


_SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=20, **_SETTINGS)
@given(st.data(), st.integers(1, 3), st.integers(0, 2**16))
def test_a_random_network_on_parts_is_the_plain_network(data, dims: int, seed: int) -> None:
    one_network(data, dims, seed)


@settings(max_examples=3, **_SETTINGS)
@given(st.data(), st.integers(1, 2), st.integers(0, 2**16))
def test_a_random_network_in_tiles_of_parts_is_the_plain_network(data, dims: int, seed: int) -> None:
    one_network(data, dims, seed, tiles=True)


@pytest.mark.slow
@settings(max_examples=150, **_SETTINGS)
@given(st.data(), st.integers(1, 3), st.integers(0, 2**16))
def test_many_random_networks_in_tiles_of_parts_are_the_plain_network(data, dims: int, seed: int) -> None:
    one_network(data, dims, seed, tiles=True)


@pytest.mark.slow
@settings(max_examples=250, **_SETTINGS)
@given(st.data(), st.integers(1, 3), st.integers(0, 2**16))
def test_many_random_networks_on_parts_are_the_plain_network(data, dims: int, seed: int) -> None:
    one_network(data, dims, seed)
