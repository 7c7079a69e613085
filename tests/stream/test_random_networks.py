"""Random local networks: whatever people may build of windows, pools, skips and resizings."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from .oracle import assert_equal_to_plain, with_statistics

_MODES = ("zeros", "reflect", "replicate", "circular")


class Chain(nn.Module):
    """Layers one after the other; some add what came in two layers before, resized if it must be."""

    def __init__(self, layers: list[nn.Module], skips: list[bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.skips = skips

    def forward(self, x):
        x = before = x * 1  # a first layer may write in place
        for layer, skip in zip(self.layers, self.skips, strict=True):
            held, x = x, layer(x)
            if skip:
                x = x + F.interpolate(before, x.shape[2:], mode="nearest")
            before = held
        return x


@st.composite
def layers(draw, dims: int, barriers: bool) -> nn.Module:
    conv = {1: nn.Conv1d, 2: nn.Conv2d}[dims]
    up = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d}[dims]
    norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[dims]
    kind = draw(st.sampled_from(["conv", "conv", "conv", "up", "max", "average", "resize", "norm", "act", "group"]))
    kernel = draw(st.integers(1, 4))
    if kind == "conv":
        mode = draw(st.sampled_from(_MODES))
        dilation = draw(st.integers(1, 2))
        padding = draw(st.integers(0, 2))
        return conv(3, 3, kernel, draw(st.integers(1, 3)), padding, dilation, draw(st.sampled_from([1, 3])), True, mode)
    if kind == "up":
        stride = draw(st.integers(1, 3))
        return up(3, 3, kernel, stride, draw(st.integers(0, (kernel - 1) // 2)), draw(st.integers(0, stride - 1)))
    if kind == "max":
        pool = {1: nn.MaxPool1d, 2: nn.MaxPool2d}[dims]
        return pool(kernel, draw(st.integers(1, 3)), kernel // 2, ceil_mode=draw(st.booleans()))
    if kind == "average":
        pool = {1: nn.AvgPool1d, 2: nn.AvgPool2d}[dims]
        return pool(kernel, draw(st.integers(1, 3)), kernel // 2, draw(st.booleans()), draw(st.booleans()))
    if kind == "resize":
        mode = draw(st.sampled_from(["nearest", "linear" if dims == 1 else "bilinear"]))
        align = draw(st.booleans()) if mode != "nearest" else None
        return nn.Upsample(scale_factor=draw(st.sampled_from([2, 1.5, 0.6])), mode=mode, align_corners=align)
    if kind == "norm":
        return with_statistics(norm(3)).train(barriers and draw(st.booleans()))
    if kind == "group":
        return nn.GroupNorm(3, 3) if barriers else nn.Hardswish()
    return draw(st.sampled_from([nn.GELU(), nn.ELU(inplace=True), nn.PReLU(3)]))


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 2), st.booleans(), st.integers(0, 2**16))
def test_random_local_networks(data, dims: int, barriers: bool, seed: int) -> None:
    torch.manual_seed(seed)
    count = data.draw(st.integers(1, 6))
    made = [data.draw(layers(dims, barriers)) for _ in range(count)]
    for one, two in pairwise(made):
        if isinstance(one, nn.ELU) and isinstance(two, nn.ELU):
            two.inplace = False  # plain PyTorch refuses to overwrite what the first one keeps
    net = Chain(made, [data.draw(st.booleans()) for _ in range(count)])
    size = [data.draw(st.integers(9, 30)) for _ in range(dims)]
    x = torch.randn(2, 3, *size)
    try:
        out = net(x)
    except (RuntimeError, ValueError):  # it shrank to nothing, or a border is wider than the image
        return
    if out[0, 0].numel() < 2:
        return
    tile = [data.draw(st.integers(3, 20)) for _ in range(dims)]
    assert_equal_to_plain(net, x, tile=tile, most=data.draw(st.sampled_from([1.0, math.inf])), statistics=barriers)
