"""Weights of calls from shapes alone: the matrix work that torch counts, without a model to run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import outcore
from tests.planner.shape_weights import _flops, _trained


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x[:, :, :3], x[:, :, :3])


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.mT


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Conv2d(6, 4, (3, 5), stride=2, groups=2, bias=False), (2, 6, 12, 16)),
        (nn.ConvTranspose2d(6, 4, 3, 2, bias=False), (2, 6, 5, 7)),
        (nn.Linear(8, 3, bias=False), (4, 5, 8)),
        (Product(), (2, 5, 8)),
    ],
)
def test_matrix_work_is_that_which_torch_counts(model: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        model(x)
    graph = outcore.capture(model, (x,))
    sizes: dict[str, Any] = _trained(graph)
    found = sum(_flops(graph, call, sum(sizes.get(p, 0) for p in call.parameters)) for call in graph.calls.values())
    assert found == counter.get_total_flops()


def test_attention_is_two_products() -> None:
    x = torch.randn(2, 3, 5, 8)
    with FlopCounterMode(display=False) as counter:  # which does not know attention on a CPU
        x @ x[:, :, :3].mT @ x[:, :, :3]
    graph = outcore.capture(Attention(), (x,))
    assert sum(_flops(graph, call, 0) for call in graph.calls.values()) == counter.get_total_flops()


def test_a_recurrent_layer_multiplies_by_its_weights_at_every_step() -> None:
    graph = outcore.capture(nn.LSTM(8, 6, bias=False, batch_first=True), (torch.randn(2, 5, 8),))
    weights = 4 * 6 * (8 + 6)
    work = [_flops(graph, call, 4 * weights) for call in graph.calls.values() if call.parameters]
    assert sum(work) == 2 * weights * 2 * 5


def test_frozen_parameters_are_not_trained_and_shared_ones_counted_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    found = _trained(outcore.capture(model, (torch.randn(4, 8),)))
    assert sum(found.values()) == 4 * (64 + 8 + 8 + 8) and "1.bias" not in found
    assert not any("running" in name for name in found)
