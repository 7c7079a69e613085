"""Parameters and optimizer state below the device: the loop unchanged, the weights those of plain training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes

SGD = lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-4)  # noqa: E731
ADAM = lambda p: torch.optim.Adam(p, 1e-3)  # noqa: E731
ADAMW = lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True)  # noqa: E731
OPTIMIZERS = {"sgd": SGD, "adam": ADAM, "adamw": ADAMW}
EVERYTHING = {"parameters": "offload", "optimizer": "offload", "flat_buffer_bytes": 4096}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.Dropout(0.2),
        nn.Linear(64, 4),
    )


def batch(i: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(i))


def offloaded(model: nn.Module, make: Callable[..., torch.optim.Optimizer], **state: Any) -> torch.optim.Optimizer:
    optimizer, where = make(model.parameters()), {**EVERYTHING, **state}
    costs = by_bytes(account(outcore.capture(model, (batch(),))), 1e9)
    outcore.within(model, (batch(),), memory=None, optimizer=optimizer, costs=costs, state=where, quiet=True)
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[torch.Tensor]:
    torch.manual_seed(5)
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        loss = model(batch(i)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def same(a: nn.Module, b: nn.Module) -> bool:
    ours, plain = a.state_dict(), b.state_dict()
    return list(ours) == list(plain) and all(torch.equal(ours[n], plain[n]) for n in plain)


def same_state(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    left, right = a.state_dict()["state"], b.state_dict()["state"]
    return all(torch.equal(left[i][k], right[i][k]) for i in right for k in right[i] if right[i][k] is not None)


WAYS = {
    "in step": {},
    "in backward": {"update": "backward"},
    "through a window": {"stage_bytes": 70_000},
    "through a window, in backward": {"stage_bytes": 70_000, "update": "backward"},
    "gradients too": {"stage_bytes": 70_000, "gradients": "offload"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_all_state_elsewhere_is_plain_training(name: str, way: str) -> None:
    model, plain = network(), network()
    optimizer, twin = offloaded(model, OPTIMIZERS[name], **WAYS[way]), OPTIMIZERS[name](plain.parameters())
    assert all(torch.equal(a, b) for a, b in zip(train(model, optimizer), train(plain, twin), strict=True))
    assert same(model, plain) and same_state(optimizer, twin)
    outcore.release(model)
    assert same(model, plain) and same_state(optimizer, twin)
    train(model, optimizer), train(plain, twin)
    assert same(model, plain)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheduled", [False, True])
def test_hooks_on_steps_run_once_a_step(way: str, scheduled: bool) -> None:
    model = network()
    optimizer = offloaded(model, SGD, **WAYS[way])
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 100)
    seen: list[str] = []
    everybody = register_optimizer_step_post_hook(lambda *_: seen.append("everybody"))
    own = optimizer.register_step_pre_hook(lambda *_: seen.append("own"))
    try:
        train(model, optimizer, 4)
    finally:
        everybody.remove(), own.remove()
    assert seen == ["own", "everybody"] * 4
