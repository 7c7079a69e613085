"""Every optimizer, with its own numbers per member, against torch's on each member alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import outcore
from outcore.fusion.optimizer.updates import UPDATES
from tests.fusion.serial import assert_as_if_alone, distance

RATES = (0.1, 0.03, 0.01)

OPTIMIZERS: dict[str, Callable[[Any, int], optim.Optimizer]] = {
    "SGD": lambda p, i: optim.SGD(p, RATES[i], momentum=(0, 0.5, 0.9)[i], weight_decay=0.01 * i),
    "SGD dampened": lambda p, i: optim.SGD(p, RATES[i], momentum=0.9, dampening=0.1 * i),
    "SGD nesterov": lambda p, i: optim.SGD(p, RATES[i], momentum=0.8 + 0.05 * i, nesterov=True),
    "SGD plain": lambda p, i: optim.SGD(p, RATES[i]),
    "Adam": lambda p, i: optim.Adam(
        p, RATES[i], betas=(0.9 - 0.1 * i, 0.99), weight_decay=0.1 * i, eps=10.0 ** -(6 + i)
    ),
    "Adam amsgrad": lambda p, i: optim.Adam(p, RATES[i], amsgrad=True, maximize=False),
    "AdamW": lambda p, i: optim.AdamW(p, RATES[i], weight_decay=0.1 * i),
    "NAdam": lambda p, i: optim.NAdam(p, RATES[i], momentum_decay=0.004 * (i + 1)),
    "RAdam": lambda p, i: optim.RAdam(p, RATES[i], betas=(0.9, 0.9 - 0.1 * i)),
    "Adamax": lambda p, i: optim.Adamax(p, RATES[i], weight_decay=0.01 * i),
    "RMSprop": lambda p, i: optim.RMSprop(p, RATES[i] / 10, momentum=0.5 * i, centered=True),
    "Adadelta": lambda p, i: optim.Adadelta(p, RATES[i], rho=0.9 - 0.1 * i),
    "Adagrad": lambda p, i: optim.Adagrad(p, RATES[i], lr_decay=0.01, initial_accumulator_value=0.1 * i),
    "ASGD": lambda p, i: optim.ASGD(p, RATES[i], t0=3, lambd=1e-2),
    "Rprop": lambda p, i: optim.Rprop(p, RATES[i] / 10, etas=(0.4 + 0.1 * i, 1.2)),
    "Adafactor": lambda p, i: optim.Adafactor(p, RATES[i]),
    "two groups": lambda p, i: _two_groups(list(p), i),
    "different flags": lambda p, i: optim.SGD(p, RATES[i], momentum=0.9, nesterov=i == 1),
    "different kinds": lambda p, i: optim.Adam(p, RATES[i]) if i == 1 else optim.SGD(p, RATES[i]),
}
ALONE = {"Adafactor", "different flags", "different kinds"}


def _two_groups(params: list[nn.Parameter], i: int) -> optim.Optimizer:
    decayed = [p for p in params if p.dim() > 1]
    rest = [p for p in params if p.dim() <= 1]
    return optim.AdamW([{"params": decayed, "weight_decay": 0.1 * i}, {"params": rest, "lr": 0.02}], lr=RATES[i])


def _net(i: int) -> nn.Module:
    torch.manual_seed(i)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(99)
    return [(torch.randn(5, 6).double(), torch.randint(3, (5,))) for _ in range(count)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_members_step_as_torch_steps_them(name: str) -> None:
    array = assert_as_if_alone(_net, _batches(12), F.cross_entropy, OPTIMIZERS[name], clip=(1.0, 0.5, 0.05))
    alone = array.groups[0].steppers["loss"].separate_reason
    assert (alone is not None) == (name in ALONE), alone


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o, i: optim.lr_scheduler.StepLR(o, 2 + i, 0.5),
        lambda o, i: optim.lr_scheduler.CosineAnnealingLR(o, 5 + i),
        lambda o, i: optim.lr_scheduler.OneCycleLR(o, RATES[i], total_steps=20, cycle_momentum=False),
        lambda o, i: optim.lr_scheduler.ReduceLROnPlateau(o, patience=i, threshold=0.2),
        lambda o, i: optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + i * t)),
    ],
)
def test_schedulers_drive_their_own_member(scheduler: Callable[..., Any]) -> None:
    batches = _batches(2) * 6
    assert_as_if_alone(_net, batches, F.cross_entropy, OPTIMIZERS["Adam"], scheduler=scheduler)


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "RMSprop", "ASGD", "Adafactor"])
def test_a_members_optimizer_state_continues_in_plain_torch(name: str) -> None:
    """Train fused, take one member out with its state_dicts, go on serially: as if it had never been fused."""
    batches = _batches(10)
    models = [_net(i) for i in range(3)]
    twin = copy.deepcopy(models[2])
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=OPTIMIZERS[name])
    for x, y in batches[:6]:
        array.step(x, y)
    out = _net(0)
    out.load_state_dict(array[2].state_dict())
    own = OPTIMIZERS[name](out.parameters(), 2)
    own.load_state_dict(copy.deepcopy(array[2].optimizer.state_dict()))
    reference = OPTIMIZERS[name](twin.parameters(), 2)
    for n, (x, y) in enumerate(batches):
        for model, optimizer in ((out, own), (twin, reference)):
            if model is out and n < 6:
                continue
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert distance(dict(out.state_dict()), dict(twin.state_dict())) < 1e-10


def test_a_changed_learning_rate_counts_from_the_next_step() -> None:
    models = [_net(i) for i in range(2)]
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=lambda p: optim.SGD(p, 0.1))
    ((x, y),) = _batches(1)
    array[1].optimizer.param_groups[0]["lr"] = 0.0
    before = [array[i].state_dict() for i in range(2)]
    array.step(x, y)
    assert distance(before[1], array[1].state_dict()) == 0.0
    assert distance(before[0], array[0].state_dict()) > 0.0


def test_parameters_without_gradient_in_some_steps_keep_their_own_count() -> None:
    """Adam counts steps per parameter: one that is not used in a step is not stepped, nor counted."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.a(x) + self.b(x) if both else self.a(x)

    torch.manual_seed(0)
    batches = [((x, n % 3 != 0), y) for n, (x, y) in enumerate(_batches(7))]
    assert_as_if_alone(lambda i: Two().double(), batches, F.cross_entropy, OPTIMIZERS["Adam"])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_numbers_of_adam_stand_in_the_order_in_which_its_kernel_reads_them(
    kind: type[torch.optim.Optimizer],
) -> None:
    group = kind([torch.zeros(1, requires_grad=True)]).param_groups[0]
    numbers = UPDATES[kind].numbers(group, 1.0, {})
    assert list(numbers) == ["b1", "b2", "size", "root", "eps", "weight_decay", "shrink"]
