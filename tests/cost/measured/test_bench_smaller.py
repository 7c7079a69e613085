"""A call that does not fit is measured smaller: first fewer samples, then a smaller image, and its time scaled."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.cost.measured.bench import smaller


class Sum(nn.Module):
    """Two images of which one has the other's size, and a scale of another rank."""

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return torch.addcmul(x, y, scale)


def shapes(*sizes: tuple[int, ...]) -> tuple[outcore.Graph, str, dict[str, tuple[int, ...]]]:
    graph = outcore.capture(Sum(), tuple(torch.randn(size) for size in sizes))
    name = next(iter(graph.calls))
    return graph, name, {value: graph.values[value].shape for value in graph.calls[name].inputs}


def test_half_of_the_samples_then_half_of_the_image_until_it_fits() -> None:
    graph, name, whole = shapes((4, 3, 64, 96), (4, 3, 64, 96), (1, 1))
    need = 1 << 20
    found = smaller(graph, name, need, need // 2)
    sizes = [shape["x"] for shape, _ in found]
    assert sizes == [(2, 3, 64, 96), (1, 3, 64, 96), (1, 3, 64, 48)]
    assert [scale for _, scale in found] == [2.0, 4.0, 8.0]
    assert all(shape["y"] == shape["x"] and shape["scale"] == whole["scale"] for shape, _ in found)


def test_only_what_fits_is_offered_and_its_factor_is_the_ratio_of_sizes() -> None:
    graph, name, whole = shapes((3, 2, 70, 50), (3, 2, 70, 50), (1,))
    found = smaller(graph, name, 1000, 200)
    assert found and len(found) <= 3
    for shape, scale in found:
        assert scale == pytest.approx(math.prod(whole["x"]) / math.prod(shape["x"]))
        assert 1000 / scale <= 200
    assert found[0][0]["x"] == (1, 2, 35, 50), "three samples become one; then the longer side is cut"


def test_sides_are_not_cut_below_what_a_layer_needs_and_channels_never() -> None:
    graph, name, _ = shapes((1, 8, 40, 33), (1, 8, 40, 33), (1,))
    sizes = [shape["x"] for shape, _ in smaller(graph, name, 1 << 20, 1 << 20)]
    assert sizes == [(1, 8, 20, 33), (1, 8, 20, 16)]
    assert smaller(graph, name, 1 << 20, 1) == []


def test_what_agrees_with_the_largest_in_a_dimension_is_cut_with_it() -> None:
    graph, name, _ = shapes((4, 3, 64, 64), (4, 1, 64, 1), (1,))
    (shape, _), *_ = smaller(graph, name, 100, 15)
    assert shape["x"] == (1, 3, 32, 64) and shape["y"] == (1, 1, 32, 1)


def test_vectors_cannot_be_cut() -> None:
    graph, name, _ = shapes((64,), (64,), (1,))
    assert smaller(graph, name, 100, 10) == []
