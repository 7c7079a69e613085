"""What an array says of how each layer was run, and that what was stopped stays as it was."""

from __future__ import annotations

import torch
from torch import nn, optim

import outcore
from outcore.fusion import FusedArray, RunMode


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(2)
        self.up, self.mix = nn.Upsample(scale_factor=2), nn.Conv2d(7, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.pool(self.norm(self.conv(x))))
        return self.mix(torch.cat([y, x], 1)).mean((1, 2, 3))


def array() -> FusedArray:
    return outcore.fuse(
        [Net() for _ in range(3)],
        loss=lambda output, target: (output - target).square().mean(),
        optimizer=lambda p: optim.SGD(p, 0.1),
        check=False,
    )


def test_every_layer_that_has_a_rule_is_said_to_be_fused() -> None:
    models = array()
    models.step(torch.rand(2, 3, 8, 8), torch.zeros(2))
    said = {call.removeprefix("model.").partition("#")[0]: way for call, way in models.coverage.items()}
    assert {said[name] for name in ("conv", "norm", "pool", "up", "mix")} == {"fused"}


def test_statistics_of_a_member_that_was_stopped_stay_through_another_arrangement() -> None:
    models = array()
    x, y = torch.rand(2, 3, 8, 8), torch.zeros(2)
    models.step(x, y)
    models[1].stop()
    kept = {name: value.clone() for name, value in models[1].state_dict().items()}
    models.step(x + 5, y)
    models.arrange(RunMode(1))
    models.step(x + 9, y)
    assert all(torch.equal(value, kept[name]) for name, value in models[1].state_dict().items())
    assert not torch.equal(models[0].state_dict()["norm.running_mean"], kept["norm.running_mean"])
    released = models.release()[1]
    assert all(torch.equal(value, kept[name]) for name, value in released.state_dict().items())
