"""What a GPU moves beside operations: types behind a norm, and gradients of operands that are spread over a result."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.memory_traffic import MemoryTraffic


def _movement(model: nn.Module, shape: tuple[int, ...]) -> MemoryTraffic:
    graph = outcore.capture(model, [shape])
    steps = graph.recording.calls()
    return MemoryTraffic(graph, account(graph, "cuda"), steps)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            stream = self.norm(self.first(x))
            return stream + self.second(stream)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_stream_behind_a_norm_is_float32_until_a_product_casts_it() -> None:
    moves = _movement(_Residual(), (4, 16))
    kinds = {moves.graph.blocks[c.block].type: name for name, c in moves.graph.calls.items()}
    names = [name for name in moves.graph.calls if "second" in name or "first" in name]
    assert moves.in_float32(kinds["LayerNorm"])
    assert moves.in_float32(kinds["add"])
    assert not any(moves.in_float32(name) for name in names)


def test_the_gradient_of_a_spread_operand_is_a_sum_over_the_result() -> None:
    moves = _movement(_Scaled(), (4, 8, 32, 32))
    (name,) = moves.graph.calls
    assert moves.bytes_of(name) == (0, 4 * 4 * 8 * 32 * 32 * 4)  # written, read: four passes over float32


def test_operands_of_one_size_move_nothing_more() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    graph = outcore.capture(Sum(), [(4, 8), (4, 8)])
    steps = graph.recording.calls()
    moves = MemoryTraffic(graph, account(graph, "cuda"), steps)
    assert [moves.bytes_of(name) for name in graph.calls] == [(0, 0)]
