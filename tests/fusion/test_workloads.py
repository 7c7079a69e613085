"""After many steps every member equals its serial twin, for the workloads people train many of."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import outcore
from outcore.models import UNet
from tests.foreign.sample import one_in
from tests.fusion.serial import assert_as_if_alone, distance
from tests.fusion.workloads import (
    Optimizer,
    Workload,
    bert,
    gan,
    lstm,
    pointnet,
    pointnet_segmentation,
    transformer,
    vision,
)

STEPS, MANY = 24, 50
RATES = (1e-3, 3e-3, 5e-4)


def _adam(params: Any, i: int) -> optim.Optimizer:
    return optim.Adam(params, RATES[i], betas=(0.9 - 0.05 * i, 0.999), weight_decay=1e-4 * i, eps=1e-4)


def _sgd(params: Any, i: int) -> optim.Optimizer:
    return optim.SGD(params, 10 * RATES[i], momentum=0.9 - 0.1 * i, weight_decay=1e-4 * i)


def _gentle(params: Any, i: int) -> optim.Optimizer:
    """For PointNet and large networks: normalisations over a few samples make training chaotic.

    At the rates of `_adam`, two plain PyTorch runs whose first weights differ by one rounding are apart by 1e-2 after
    fifty steps, so no comparison of runs would say anything.
    """
    return optim.SGD(params, RATES[i], momentum=0.5 - 0.1 * i, weight_decay=1e-4 * i)


def _adadelta(params: Any, i: int) -> optim.Optimizer:
    return optim.Adadelta(params, 100 * RATES[i], rho=0.9 - 0.05 * i)


def _step_lr(optimizer: optim.Optimizer, i: int) -> Any:
    return optim.lr_scheduler.StepLR(optimizer, 10 + 5 * i, 0.5 + 0.1 * i)


def _cosine(optimizer: optim.Optimizer, i: int) -> Any:
    return optim.lr_scheduler.CosineAnnealingLR(optimizer, 20 + 10 * i)


def _plateau(optimizer: optim.Optimizer, i: int) -> Any:
    return optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2 + i, threshold=0.1)


Case = tuple[Workload, Optimizer, Any]
CASES: dict[str, Case] = {
    "PointNet": (pointnet(8, 20, 5, 4), _gentle, _step_lr),
    "PointNet segmentation": (pointnet_segmentation(8, 12, 5, 4), _gentle, _cosine),
    "Transformer": (transformer(2, 6, 30, 8, 2, 16, 2), _adadelta, _step_lr),
    "BERT": (bert(2, 6, 30, 8, 2, 2), _adam, _cosine),
    "LSTM": (lstm(2, 7, 30, 6, 5, 4), _adam, _plateau),
    "U-Net": (
        Workload(
            lambda i: UNet(3, 2, width=4, depth=2), lambda: (torch.randn(2, 3, 16, 16), torch.randint(2, (2, 16, 16)))
        ),
        _sgd,
        _step_lr,
    ),
}
LARGE: dict[str, Case] = {
    "ResNet-18": (vision("resnet18", 8), _gentle, _cosine),
    "MobileNet-v3-Large": (vision("mobilenet_v3_large", 8, dropout=lambda i: 0.1 * (i + 1)), _gentle, _step_lr),
    "BERT-Medium": (bert(2, 8, 500), _gentle, _cosine),
    "PointNet of full width": (pointnet(8, 64, 16), _gentle, _step_lr),
}


def _equals_serial(
    case: Case, steps: int = STEPS, members: int = 3, dtype: torch.dtype = torch.float64, tolerance: float = 1e-10
) -> None:
    workload, optimizer, scheduler = case

    def seeded(i: int) -> nn.Module:
        torch.manual_seed(i)
        return workload.build(i).to(dtype)

    torch.manual_seed(123)
    made = [workload.batch() for _ in range(steps)]
    batches = [(x.to(dtype) if x.is_floating_point() else x, y) for x, y in made]
    array = assert_as_if_alone(
        seeded,
        batches,
        F.cross_entropy,
        optimizer,
        members=members,
        tolerance=tolerance,
        scheduler=scheduler,
        seeds=[11, 12, 13][:members],
        clip=[5.0, 0.5, 1.0][:members],
    )
    assert array.way.width == members, array.notes


@pytest.mark.parametrize("name", CASES)
def test_many_steps_equal_serial_training(name: str) -> None:
    _equals_serial(CASES[name])


@pytest.mark.parametrize("name", one_in(3, ["Transformer", "LSTM", "U-Net"]))
def test_many_steps_in_single_precision_stay_within_a_thousandth(name: str) -> None:
    _equals_serial(CASES[name], members=2, dtype=torch.float32, tolerance=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_fifty_steps_equal_serial_training_at_full_size(name: str) -> None:
    _equals_serial(LARGE[name], MANY, members=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_fifty_steps_equal_serial_training(name: str) -> None:
    _equals_serial(CASES[name], MANY)


def test_resnet18_equals_serial_training() -> None:
    _equals_serial((vision("resnet18", 4), _gentle, _cosine), steps=2, members=2)


def test_a_gan_with_two_optimizers_equals_serial_training() -> None:
    workload = gan(2, 2, 5)
    objectives = workload.objectives(_adam)

    def build(i: int) -> nn.Module:
        torch.manual_seed(i)
        return workload.build(i).double()

    models = [build(i) for i in range(2)]
    twins = [copy.deepcopy(m) for m in models]
    array = outcore.fuse(models, objectives=objectives)
    torch.manual_seed(5)
    batches = [tuple(t.double() for t in workload.batch()) for _ in range(STEPS)]
    for real, noise in batches:
        losses = array.step(real, noise)
        assert losses.keys() == {"d", "g"}
    for i, twin in enumerate(twins):
        optimizers = {name: o.optimizer(twin, i) for name, o in objectives.items()}
        for real, noise in batches:
            for name, objective in objectives.items():
                twin.zero_grad()
                objective.loss(twin, real, noise).backward()
                optimizers[name].step()
        assert distance(dict(twin.state_dict()), array[i].state_dict()) < 1e-10
