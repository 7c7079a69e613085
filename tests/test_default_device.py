"""`torch.set_default_device` is the user's: memory that outcore takes for itself says where it is.

A program that has set a GPU as its default gets new tensors there. What outcore makes for its own use on the host would
be there too, and break. The default "meta" stands in for such a device here: whatever forgets to say where it is made
has no numbers.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import outcore

SOURCE = Path(outcore.__file__).parent
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
FOLLOW = {"models", "bench", "keras"}
"""Packages whose tensors are those of a user's model."""


def test_every_tensor_that_is_made_says_where() -> None:
    silent = []
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] in FOLLOW:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), keywords=given):
                    if name in FACTORIES and not any(k.arg in ("device", "out", None) for k in given):
                        silent.append(f"{path.relative_to(SOURCE)}:{node.lineno} torch.{name}")
    assert silent == []


def network() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    conv = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2)]
    head = [nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(*conv, *head), torch.randn(4, 3, 16, 16), torch.randint(4, (4,))


def gradients(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    nn.functional.cross_entropy(model(images), labels).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("policy", ["", "recompute", "offload", "encode:sign", "encode:sparse"])
def test_within_under_another_default_device(policy: str) -> None:
    model, images, labels = network()
    want = gradients(model, images, labels)
    for p in model.parameters():
        p.grad = None
    model.load_state_dict(network()[0].state_dict())
    with torch.device("meta"):
        if policy:
            outcore.within(model, (images,), memory=None, plan={"2#0:out": policy}, quiet=True)
        else:
            outcore.within(model, (images,), memory="85%", optimizer=torch.optim.Adam(model.parameters()), quiet=True)
        got = gradients(model, images, labels)
    outcore.release(model)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_costs_and_plans_under_another_default_device() -> None:
    model, images, _ = network()
    with torch.device("meta"):
        graph = outcore.capture(model, (images,))
        assert outcore.measure(graph, time_limit_s=0.5, between=True).total().forward_s > 0
        assert outcore.memory_of(model, (images,)) > 0
        assert outcore.plan(graph, devices=2).predicted is not None


def test_many_models_as_one_under_another_default_device() -> None:
    def members() -> list[nn.Module]:
        torch.manual_seed(3)
        return [nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(3)]

    torch.manual_seed(4)
    batches = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(3)]
    found = []
    for device in ("cpu", "meta"):
        models = members()
        with torch.device(device):
            many = outcore.fuse(
                models,
                loss=nn.functional.cross_entropy,
                optimizer=lambda params, i: torch.optim.Adam(params, lr=0.01 * (i + 1)),
            )
            found.append([many.step(*batch) for batch in batches])
    assert torch.equal(torch.stack(found[0]), torch.stack(found[1]))
