"""Padding on both sides: what is wanted is exact, what hangs over is little, and nothing is copied for padding."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import outcore
from outcore.ops.region import SlidingWindow, clip, elements
from outcore.stream import stream
from outcore.stream.execute.border_padding import window_excess
from outcore.stream.plan.tiles import plan_tile
from outcore.stream.rules.convolve import ConvolutionRule
from outcore.stream.rules.pool import MaxPool
from tests.stream.oracle import any_excess, assert_equal_to_plain, with_statistics


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_is_wanted_lies_where_it_is_said(data) -> None:
    size, kernel = data.draw(st.integers(4, 30)), data.draw(st.integers(1, 4))
    stride, dilation, low = (data.draw(st.integers(*r)) for r in ((1, 3), (1, 2), (0, 3)))
    span = dilation * (kernel - 1) + 1
    if size + 2 * low < span:
        return
    image = torch.rand(1, 1, size, dtype=torch.float64)
    weight = torch.rand(1, 1, kernel, dtype=torch.float64)
    whole = F.conv1d(image, weight, stride=stride, padding=low, dilation=dilation)
    lo = data.draw(st.integers(0, whole.shape[2] - 1))
    hi = data.draw(st.integers(lo + 1, whole.shape[2]))
    window = SlidingWindow(size, kernel, stride, dilation, low)
    a, b = clip(window.reach((lo, hi)), size)
    held = (max(a - data.draw(st.integers(0, 3)), 0), min(b + data.draw(st.integers(0, 3)), size))
    crop = image[..., held[0] : held[1]].clone()
    crop[..., : a - held[0]] = crop[..., b - held[0] :] = 1e9  # excess of the operand: must not matter
    if (found := window_excess(window, held, (lo, hi))) is None:
        start, stop = window.reach((lo, hi))
        padded = max(-start, stop - size, 0)
        aligned = padded + (held[0] - padded - start) % stride
        assert (start < 0 and held[0] > 0) or (stop > size and held[1] < size) or aligned >= span
        return
    padding, (first, last) = found
    assert first <= lo and hi <= last
    made = F.conv1d(crop, weight, stride=stride, padding=padding, dilation=dilation)
    assert made.shape[2] == last - first
    torch.testing.assert_close(made[..., lo - first : hi - first], whole[..., lo:hi])


def test_almost_nothing_is_copied_for_the_padding_of_a_unet() -> None:
    net = outcore.models.UNet(width=4).eval()
    prepared = stream(net, tile=2048).prepare(torch.empty(1, 3, 4096, 5000, device="meta"))
    (stage,), (cut,) = prepared.streaming.stages, prepared.grids

    def numbers_and_copies() -> tuple[int, int]:
        plans = [p for n in cut.tiles() if (p := plan_tile(prepared.network, stage, cut, n)) is not None]
        padded = [
            elements(plan.needs[node.output][0])
            for plan in plans
            for node in stage.nodes
            if isinstance(node.rule, (ConvolutionRule, MaxPool))
            and node.output not in plan.widened
            and node.rule.pads(plan.regions[node.output])
        ]
        return sum(p.elements() for p in plans), sum(padded)

    numbers, copies = numbers_and_copies()
    with any_excess(1.0):
        exact_numbers, exact_copies = numbers_and_copies()
    assert exact_numbers < numbers < 1.02 * exact_numbers
    assert copies < 0.02 * exact_copies


@pytest.mark.parametrize("most", [1.0, 1.06, math.inf])
def test_a_network_with_every_kind_of_padding(most: float) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(2, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
            self.pool = nn.MaxPool2d(3, 2, 1)
            self.one, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
            self.wide = nn.Conv2d(4, 4, (2, 5), padding=(1, 2), dilation=(3, 1), groups=2)
            self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
            self.head = nn.Conv2d(4, 2, 1)

        def forward(self, x):
            x = self.pool(self.stem(x))
            x = torch.relu(self.norm(self.one(x)) + x)
            return self.head(self.up(self.wide(x)))

    torch.manual_seed(0)
    assert_equal_to_plain(with_statistics(Net()).eval(), torch.randn(1, 2, 331, 290), tile=(120, 160), most=most)
