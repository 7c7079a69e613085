"""Sparse Jacobians of layers against autograd, place by place, and a network scanned through them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore.errors import ScanError
from outcore.scan import chain, jacobian_of

LAYERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv1d(2, 3, 3, padding=1), (2, 9)),
    (nn.Conv2d(2, 3, 3, padding=1), (2, 5, 7)),
    (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(2, 0), dilation=(2, 1), groups=2), (4, 9, 6)),
    (nn.Conv2d(3, 2, 3, padding="same", bias=False), (3, 4, 4)),
    (nn.Conv2d(3, 2, 3, padding="valid"), (3, 4, 4)),
    (nn.Conv2d(3, 3, 1, groups=3), (3, 2, 2)),
    (nn.Conv3d(1, 2, 2, stride=2), (1, 4, 4, 5)),
    (nn.ReLU(), (2, 3, 3)),
    (nn.MaxPool1d(2), (2, 6)),
    (nn.MaxPool2d(2), (2, 6, 5)),
    (nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True), (2, 6, 7)),
    (nn.MaxPool3d(2), (2, 4, 4, 4)),
    (nn.AvgPool1d(3, stride=2), (2, 9)),
    (nn.AvgPool2d(2, padding=1), (2, 6, 5)),
    (nn.BatchNorm2d(3).eval(), (3, 4, 4)),
    (nn.Linear(4, 3), (4,)),
    (nn.Flatten(0), (2, 3, 2)),
    (nn.Dropout().eval(), (5,)),
]


def applied(module: nn.Module, x: Tensor) -> Tensor:
    """The layer on one sample."""
    if isinstance(module, nn.BatchNorm2d):
        return module(x.unsqueeze(0)).squeeze(0)
    return module(x)


@pytest.mark.parametrize(("module", "shape"), LAYERS, ids=[str(module) for module, _ in LAYERS])
def test_equals_autograd(module: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = module.double()
    x = torch.randn(shape, dtype=torch.float64)
    expected: Any = torch.autograd.functional.jacobian(lambda x: applied(module, x), x)
    found = jacobian_of(module, x)
    assert found.layout == torch.sparse_csr
    assert torch.equal(found.to_dense(), expected.reshape(-1, math.prod(shape)))


def test_convolutions_store_no_guaranteed_zeros() -> None:
    found = jacobian_of(nn.Conv2d(1, 1, 3, padding=1), torch.zeros(1, 4, 4))
    assert found.values().numel() == (3 * 4 - 2) ** 2


def test_a_network_scanned_through_its_sparse_jacobians_has_autograds_gradients() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(0)]
    values = [torch.randn(1, 8, 8, dtype=torch.float64, requires_grad=True)]
    for layer in layers:
        values.append(layer.double()(values[-1]))
    gradient = torch.randn_like(values[-1])
    expected = torch.autograd.grad(values[-1], values[:-1], gradient)
    jacobians = [jacobian_of(layer, x.detach()) for layer, x in zip(layers, values, strict=False)]
    for levels in (None, 0, 1):
        found = chain(jacobians, gradient, levels=levels)
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a.flatten(), b)


def test_an_unknown_layer_is_refused() -> None:
    with pytest.raises(ScanError, match="no Jacobian is known for LayerNorm"):
        jacobian_of(nn.LayerNorm(3), torch.zeros(3))
    with pytest.raises(ScanError, match="BatchNorm"):
        jacobian_of(nn.BatchNorm2d(3).train(), torch.zeros(3, 2, 2))
