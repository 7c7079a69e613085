"""Convolutions of all members: in whichever form they run, what each member's own gives."""

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

# Size of the map, kernel, stride, padding, dilation, groups; then the taps that are left, and whether it is a product.
CASES = [
    ((1, 1), (3, 3), 1, 1, 1, 1, (1, 1), True),  # ResNet-18's last layers on images of 32 pixels
    ((2, 2), (3, 3), 2, 1, 1, 1, (2, 2), True),
    ((2, 2), (3, 3), 1, 1, 1, 1, (3, 3), False),
    ((2, 2), (5, 5), 2, 2, 1, 3, (2, 2), False),
    ((1, 4), (3, 3), 1, 1, 1, 1, (1, 3), False),
    ((4, 4), (4, 4), 1, 0, 1, 1, (4, 4), True),
    ((5, 3), (1, 1), 2, 0, 1, 1, (1, 1), True),
    ((5, 3), (1, 1), 1, 1, 1, 1, (1, 1), False),
    ((3, 3), (3, 3), 1, 2, 2, 1, (3, 3), False),
    ((1, 2), (3, 3), 1, 2, 2, 1, (1, 1), False),
    ((6, 7), (3, 2), (2, 1), (1, 0), 1, 3, (3, 2), False),
    ((2, 2), (3, 3), 3, 1, 1, 1, (2, 2), True),
    ((3,), (7,), 2, 3, 1, 1, (5,), False),
    ((1, 1, 1), (3, 3, 3), 1, 1, 1, 1, (1, 1, 1), True),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("size", "kernel", "stride", "padding", "dilation", "groups", "left", "product"), CASES)
def test_a_convolution_of_all_is_that_of_each(
    size: tuple[int, ...], kernel: tuple[int, ...], stride: int, padding: int, dilation: int, groups: int,
    left: tuple[int, ...], product: bool, bias: bool,
) -> None:  # fmt: skip
    torch.manual_seed(1)
    conv = MemberConvolution.of(len(size), stride, padding, dilation, groups)
    x = torch.randn(2, 4, 3 * groups, *size, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 2 * groups, 3, *kernel, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 2 * groups, dtype=torch.float64, requires_grad=True) if bias else None
    crop, own = conv.cropped(size, weight)
    assert tuple(own.shape[3:]) == left
    assert (crop.as_product(Stacked(x), own) is not None) == product
    found = conv.fused(Stacked(x), Stacked(weight), None if b is None else Stacked(b)).tensor
    ways = conv.ways(x, weight)
    assert ("unfolded" in ways) == (groups == 1 and dilation == 1)
    each = zip(x, weight, b if b is not None else [None, None], strict=True)
    expected = torch.stack([conv(*of_one) for of_one in each])
    given: list[Tensor] = [x, weight, *([] if b is None else [b])]
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, given, grad)
    for made in (found, *(conv.stacked(way, Stacked(x), weight, b).tensor for way in ways)):
        torch.testing.assert_close(made, expected, rtol=0, atol=1e-12)
        for ours, theirs in zip(torch.autograd.grad(made, given, grad), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_what_pads_in_torchs_own_words_is_left_as_it_is() -> None:
    conv = MemberConvolution.of(2, 1, "same", 1, 1)
    weight = torch.randn(2, 5, 3, 3, 3)
    assert conv.cropped((1, 1), weight) == (conv, weight)


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "how", [pytest.param(way, marks=gpu) for way in ("unfolded", "grouped", "members", "depthwise")]
)
def test_every_form_can_be_captured(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> nn.Module:
        convs = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1)]
        return nn.Sequential(*convs, nn.ReLU(), nn.Conv2d(8, 4, 3, 2, 1), nn.Flatten()).cuda()

    monkeypatch.setattr(convolution, "way", lambda *given: how)
    torch.manual_seed(3)
    models = [build() for _ in range(3)]
    twins = [copy.deepcopy(m) for m in models]
    array = outcore.fuse(
        models, loss=F.cross_entropy, optimizer=lambda p, i: torch.optim.SGD(p, 0.01 * (i + 1)),
        way=RunMode(3, True, channels_last=True),
    )  # fmt: skip
    x, y = torch.randn(16, 3, 8, 8, device="cuda"), torch.randint(4, (16,), device="cuda")
    for _ in range(5):
        array.step(x, y)
    assert array.way.width == 3 and array.runner.refused is None, (array.notes, array.runner.refused)
    for i, twin in enumerate(twins):
        optimizer = torch.optim.SGD(twin.parameters(), 0.01 * (i + 1))
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(twin(x), y).backward()
            optimizer.step()
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(array[i].state_dict()[name], value, rtol=1e-2, atol=1e-3)
