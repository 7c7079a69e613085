"""Images whose channels are not their second dimension: followed to the first layer that knows of pixels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outcore.stream import stream


class Permuted(nn.Module):
    """Takes and returns images in another order of dimensions than its layers."""

    def __init__(self, dims: int, order: tuple[int, ...], scaled: bool, back: bool) -> None:
        super().__init__()
        conv, pool, norm = (getattr(nn, f"{kind}{dims}d") for kind in ("Conv", "MaxPool", "BatchNorm"))
        self.layers = nn.Sequential(
            conv(3, 4, 3, padding=1), norm(4).eval(), nn.ReLU(), pool(2), conv(4, 2, 3, padding="same")
        )
        self.order, self.scaled, self.back = order, scaled, back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x - 0.5) * 2 if self.scaled else x
        y = self.layers(nn.functional.pad(x.permute(self.order), [0, 2]))
        return y.permute([self.order.index(d) for d in range(len(self.order))]) if self.back else y


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize(
    ("order", "scaled", "back"),
    [
        ((0, 3, 1, 2), False, True),
        ((0, 3, 1, 2), True, False),
        ((0, 2, 3, 1), True, True),
        ((0, 4, 1, 2, 3), True, True),
    ],
)
def test_tiles_run_along_the_pixels(order: tuple[int, ...], scaled: bool, back: bool) -> None:
    torch.manual_seed(0)
    dims = len(order) - 2
    model = Permuted(dims, order, scaled, back).double().requires_grad_()
    sides = (3, 22, 18, 14)[: dims + 1]
    x = torch.rand(2, *(sides[order.index(d) - 1] for d in range(1, dims + 2)), dtype=torch.float64)
    want = model(x)
    streamed = stream(model, tile=8)
    have = streamed(x)
    assert not streamed.prepare(x).tail and streamed.counts.forward >= 4
    assert torch.allclose(want, have, rtol=0, atol=1e-12)
    weight = torch.rand_like(want)
    for a, b in zip(gradients(model, (want * weight).sum()), gradients(model, (have * weight).sum()), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_loss_over_pixels_takes_targets_with_channels_last(sparse: bool) -> None:
    torch.manual_seed(0)
    model = Permuted(2, (0, 3, 1, 2), True, True).double()
    x = torch.rand(2, 22, 18, 3, dtype=torch.float64)
    x[:, :8] = 0.25  # tiles of one colour

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if sparse:
            return nn.functional.cross_entropy(output.movedim(-1, 1), target)
        return nn.functional.mse_loss(output, target)

    want = model(x)
    target = torch.randint(2, want.shape[:-1]) if sparse else torch.rand_like(want)
    plain = loss(want, target)
    streamed = stream(model, tile=6)
    found = streamed.loss(x, target=target, loss=loss)
    assert torch.allclose(plain, found, rtol=0, atol=1e-12) and streamed.counts.forward >= 4
    for a, b in zip(gradients(model, plain), gradients(model, found), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)
