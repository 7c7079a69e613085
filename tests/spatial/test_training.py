"""Twenty steps of SGD on parts: weights, momentum and running statistics of one process.

Deep networks with batch norms over few pixels multiply a rounding error by ten in every step at ordinary rates: plain
PyTorch in channels-last order departs from itself by 3e-9 after five steps of ResNet-50 on one small image. So they
take small steps here, in which an error of the method would still show.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from outcore.spatial.virtual import VirtualRanks

from .test_networks import EVERY, LARGE

STEPS = 20
SMALL = {
    "amoebanet": (2, 3, 41, 38),
    "unet of five levels": (1, 3, 51, 38),
    "resnet50": (4, 3, 97, 66),
    "densenet121": (4, 3, 98, 66),
    "inception": (4, 3, 91, 83),
}
"""Images of the large networks: twenty steps take a minute. Their last norms see some ten elements of a channel; over
two or six, one image of 67 x 50, gradients are in the thousands, and plain steps depart from each other."""


def _loss(output: torch.Tensor) -> torch.Tensor:
    return (output - 0.3).square().mean()


def _train(model: nn.Module, step, images: list[torch.Tensor], rate: float) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    losses = []
    for image in images:
        optimizer.zero_grad()
        losses.append(step(image))
        optimizer.step()
    return losses


def _compare(
    model: nn.Module, shape: tuple[int, ...], grid: tuple[int, ...], steps: int, rate: float = 1e-3, **options
) -> None:
    torch.manual_seed(4)
    images = [torch.randn(shape, dtype=torch.float64) for _ in range(steps)]
    model = model.double().train()
    plain = copy.deepcopy(model)
    split = VirtualRanks(model, (images[0],), grid, **options)

    def plain_step(image: torch.Tensor) -> float:
        loss = _loss(plain(image))
        loss.backward()
        return loss.item()

    wanted = _train(plain, plain_step, images, rate)
    found = _train(model, lambda image: split.step((image,), _loss).item(), images, rate)
    assert found == pytest.approx(wanted, rel=1e-10)
    largest = max(p.abs().max().item() for p in plain.parameters())
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (one - other).abs().max() <= 1e-10 * largest, name
    for (name, one), other in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(one, other[1], rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("early", [(), None])
@pytest.mark.parametrize("name", EVERY)
def test_twenty_steps_on_a_grid_are_those_of_one_process(name: str, early: tuple[str, ...] | None) -> None:
    make, shape = EVERY[name][0], SMALL.get(name, EVERY[name][1])
    grid = (2, 1, 2) if len(shape) == 5 else (2, 2) if early is None else (1, 3)
    torch.manual_seed(3)
    _compare(make(), shape, grid, STEPS, 1e-6 if name in LARGE else 1e-3, early=early)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "deeplab"])
def test_twenty_steps_in_tiles_on_a_grid_are_those_of_one_process(name: str) -> None:
    make, shape = EVERY[name]
    torch.manual_seed(3)
    _compare(make(), shape, (2, 2), STEPS, tile=14)
