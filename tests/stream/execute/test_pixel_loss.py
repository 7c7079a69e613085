"""A loss over pixels in one pass, against the plain one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.errors import StreamError
from outcore.stream import FunctionSource, PixelLoss, stream
from tests.stream.oracle import TOLERANCE, with_statistics


class Segmenter(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), norm(6), nn.ReLU(), nn.Conv2d(6, 6, 3, 1, 1), nn.ReLU())
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.head = nn.Conv2d(7, 3, 1)

    def forward(self, x):
        return self.head(torch.cat([self.up(self.down(x)), x], 1))


def compare(net: nn.Module, x: torch.Tensor, target: torch.Tensor, loss, plain_loss, **options):
    net = net.double()
    plain = copy.deepcopy(net)
    ours, theirs = x.double().clone().requires_grad_(), x.double().clone().requires_grad_()
    expected = plain_loss(plain(theirs), target)
    (3 * expected).backward()
    streamed = stream(net, tile=10, **options)
    got = streamed.loss(ours, target=target, loss=loss)
    (3 * got).backward()
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)
    largest = max(p.grad.abs().max() for p in plain.parameters())
    for (name, mine), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad - other.grad).abs().max() <= TOLERANCE * largest, name
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=TOLERANCE)
    return streamed


def test_mean_cross_entropy_takes_one_pass() -> None:
    x, target = torch.randn(2, 3, 26, 34), torch.randint(3, (2, 26, 34))
    net = with_statistics(Segmenter()).eval()
    streamed = compare(net, x, target, F.cross_entropy, F.cross_entropy)
    assert streamed.counts.forward == streamed.counts.backward == 12


def test_a_sum_of_squares() -> None:
    x, target = torch.randn(1, 3, 26, 34), torch.randn(1, 3, 26, 34, dtype=torch.float64)

    def squares(output, target):
        return F.mse_loss(output, target, reduction="sum")

    compare(with_statistics(Segmenter()).eval(), x, target, PixelLoss(squares, "sum"), squares)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda c: nn.GroupNorm(2, c)])
def test_norms_over_the_image_take_passes_of_their_own(norm) -> None:
    x, target = torch.randn(2, 3, 26, 34), torch.randint(3, (2, 26, 34))
    compare(Segmenter(norm), x, target, F.cross_entropy, F.cross_entropy, statistics=True)


def test_glass_is_computed_once_and_counted_as_often_as_it_occurs() -> None:
    x = torch.full((1, 3, 96, 96), 0.9, dtype=torch.float64)
    x[:, :, 40:50, 40:50] = torch.rand(1, 3, 10, 10, dtype=torch.float64)
    target = torch.zeros(1, 96, 96, dtype=torch.long)
    target[:, 44:47, 44:47] = 2
    net = with_statistics(Segmenter()).double().eval()
    plain = copy.deepcopy(net)
    F.cross_entropy(plain(x), target).backward()
    streamed = stream(net, tile=10)
    streamed.loss(x, target=target, loss=F.cross_entropy).backward()
    assert streamed.counts.reused > 40 and streamed.counts.forward < 40
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_targets_may_be_lazy() -> None:
    x, target = torch.randn(1, 3, 26, 34), torch.randint(3, (1, 26, 34))
    net = with_statistics(Segmenter()).eval()
    lazy = FunctionSource((1, 26, 34), lambda r: target[tuple(slice(*i) for i in r)], torch.int64)
    with torch.no_grad():
        got = stream(net, tile=9).loss(x, target=lazy, loss=F.cross_entropy)
        torch.testing.assert_close(got, F.cross_entropy(net(x), target))


def test_a_network_that_ends_in_a_class_has_no_loss_over_pixels() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(StreamError, match="two passes"):
        stream(net, tile=8).loss(torch.randn(1, 3, 20, 20), target=torch.zeros(1, 4), loss=F.mse_loss)
    with pytest.raises(StreamError, match="pixels must agree"):
        stream(Segmenter().eval(), tile=8).loss(torch.randn(1, 3, 20, 20), target=torch.zeros(1, 4, 4), loss=F.mse_loss)
    with pytest.raises(outcore.OutcoreError, match="reduction"):
        PixelLoss(F.mse_loss, "none")  # type: ignore[arg-type]


def test_the_loss_keeps_its_own_precision_when_the_output_is_of_half() -> None:
    net, x = with_statistics(Segmenter()).eval(), torch.randn(1, 3, 26, 34)
    target = torch.randint(3, (1, 26, 34))
    with torch.autocast("cpu", torch.bfloat16):
        got = stream(net, tile=10).loss(x, target=target, loss=lambda out, y: F.cross_entropy(out.float(), y))
        expected = F.cross_entropy(net(x).float(), target)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
