"""State below a GPU: pinned homes, copies on streams of their own, the weights of plain training."""

from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.rough import by_bytes
from outcore.cost.saved import account
from tests.memory.test_state import OPTIMIZERS

pytestmark = pytest.mark.gpu


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    head = [
        nn.AdaptiveAvgPool2d(8),
        nn.Flatten(),
        nn.Linear(2048, 4096),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(4096, 4),
    ]
    return nn.Sequential(*layers, *head).cuda()


def batch(i: int = 0) -> torch.Tensor:
    return torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(i)).cuda()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 12) -> None:
    torch.manual_seed(5)
    for i in range(steps):
        optimizer.zero_grad()
        model(batch(i)).square().mean().backward()
        optimizer.step()


WAYS: dict[str, dict[str, Any]] = {
    "parameters": {"parameters": "offload"},
    "parameters, in backward": {"parameters": "offload", "update": "backward"},
    "optimizer": {"optimizer": "offload"},
    "optimizer, in backward": {"optimizer": "offload", "update": "backward"},
    "both": {"parameters": "offload", "optimizer": "offload", "parcel_bytes": 2**16},
    "both, in backward": {"parameters": "offload", "optimizer": "offload", "update": "backward"},
    "window": {"parameters": "offload", "stage_bytes": 40 * 2**20, "parcel_bytes": 2**16},
    "window, in backward": {"parameters": "offload", "stage_bytes": 40 * 2**20, "update": "backward"},
    "all": {"parameters": "offload", "optimizer": "offload", "gradients": "offload", "stage_bytes": 40 * 2**20},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_on_a_gpu_with_state_on_the_host_is_plain_training(name: str, way: str) -> None:
    torch.backends.cudnn.deterministic = True
    model, plain = network(), network()
    optimizer, twin = (OPTIMIZERS[name](m.parameters()) for m in (model, plain))
    costs = by_bytes(account(outcore.capture(model, (batch(),))), 1e12)
    outcore.within(model, (batch(),), memory=None, optimizer=optimizer, costs=costs, state=WAYS[way], quiet=True)
    train(model, optimizer), train(plain, twin)
    with torch.no_grad():
        assert torch.equal(model.eval()(batch()), plain.eval()(batch()))
    ours = model.state_dict()
    differing = [n for n, t in plain.state_dict().items() if not torch.equal(ours[n].cuda(), t)]
    assert not differing
    outcore.release(model)
    assert all(p.is_cuda for p in model.parameters())
    train(model.train(), optimizer, 3), train(plain.train(), twin, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
