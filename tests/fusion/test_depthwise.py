"""Depthwise convolutions of all members: whichever way, what each member's own convolution gives."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outcore
from outcore.fusion import RunMode
from outcore.fusion.program.values import Stacked
from outcore.fusion.rules import convolution
from outcore.fusion.rules.convolution import MemberConvolution
from outcore.fusion.rules.depthwise import depthwise, is_depthwise

SHAPES = [
    (3, 5, 7, 6, 3, 1, 1), (2, 130, 4, 4, 5, 2, 2), (64, 9, 1, 1, 5, 1, 2), (3, 6, 2, 2, 3, 1, 1),
    (2, 7, 2, 2, 5, 2, 2), (2, 4, 9, 5, 3, 2, 0), (20, 3, 5, 5, 3, 1, 1), (40, 33, 16, 16, 3, 2, 1),
]  # fmt: skip
"""Samples, channels, height, width, kernel, stride, padding."""
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _given(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[MemberConvolution, Tensor, Tensor]:
    samples, channels, height, width, kernel, stride, padding = shape
    torch.manual_seed(0)
    x = torch.randn(samples, height, width, channels, dtype=dtype, device=device).movedim(-1, 1)
    weight = torch.randn(channels, 1, kernel, kernel, dtype=dtype, device=device)
    return MemberConvolution.of(2, stride, padding, 1, channels), x.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("how", ["grouped", "members", "depthwise"])
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_all_ways_give_what_each_members_convolution_gives(shape: tuple[int, ...], how: str) -> None:
    conv, x, weight = _given(shape, torch.float64, "cpu")
    xs, weights = torch.stack([x, 2 * x, x - 1]), torch.stack([weight, -weight, weight + 1])
    found = conv.stacked(how, Stacked(xs), weights, None).tensor
    expected = torch.stack([conv(a, w, None) for a, w in zip(xs, weights, strict=True)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_kernels_are_for_gpus_and_for_channels_side_by_side() -> None:
    conv, x, weight = _given(SHAPES[0], torch.float32, "cpu")
    assert not is_depthwise(conv, x, weight)


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=gpu) for d in (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_equal_double_precision(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    conv, x, weight = _given(shape, dtype, "cuda")
    assert is_depthwise(conv, x, weight)
    found = depthwise(conv, x, weight, None)
    wide, own = (t.detach().double().requires_grad_() for t in (x, weight))
    expected = F.conv2d(wide, own, None, conv.stride, conv.padding, 1, conv.groups)
    grad = torch.randn_like(found)
    ours, theirs = (
        torch.autograd.grad(y, given, grad.to(y.dtype)) for y, given in ((found, (x, weight)), (expected, (wide, own)))
    )
    rounding = 8 * torch.finfo(dtype).eps
    for one, other in zip((found, *ours), (expected, *theirs), strict=True):
        assert one.shape == other.shape and one.dtype == dtype
        assert float((one - other).detach().abs().max()) <= rounding * float(other.detach().abs().max())


@pytest.mark.parametrize("autocast", [pytest.param(d, marks=gpu) for d in (None, torch.bfloat16)])
def test_an_array_with_them_equals_its_members(autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "way", lambda *given: "depthwise")

    def build() -> nn.Module:
        pieces = [nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1, groups=8), nn.ReLU()]
        return nn.Sequential(*pieces, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).cuda()

    torch.manual_seed(3)
    models = [build() for _ in range(4)]
    twins = [copy.deepcopy(m) for m in models]
    array = outcore.fuse(
        models, loss=F.cross_entropy, optimizer=lambda p, i: torch.optim.SGD(p, 0.01 * (i + 1)), autocast=autocast,
        way=RunMode(4, True, channels_last=True),
    )  # fmt: skip
    x, y = torch.randn(16, 3, 12, 12, device="cuda"), torch.randint(4, (16,), device="cuda")
    for _ in range(4):
        array.step(x, y)
    assert array.way.width == 4, array.notes
    for i, twin in enumerate(twins):
        optimizer = torch.optim.SGD(twin.parameters(), 0.01 * (i + 1))
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast is not None):
                F.cross_entropy(twin(x), y).backward()
            optimizer.step()
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(array[i].state_dict()[name], value, rtol=2e-2, atol=2e-3)
