"""Which calls may be the head of a region that is computed in chunks: products with a weight, as torch makes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.planner.memory.chunked_region import _is_head


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.narrow, self.hooked, self.norm = (
            nn.Linear(8, 16), nn.Linear(8, 1), nn.Linear(8, 16), nn.LayerNorm(8)
        )  # fmt: skip
        self.weight = nn.Parameter(torch.rand(16, 8))
        self.hooked.register_forward_hook(lambda module, given, result: result)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.norm(x)
        return self.plain(x), self.narrow(x), self.hooked(x), F.linear(x, self.weight), F.linear(x, x), x.relu()


def test_a_head_is_a_linear_layer_or_a_product_with_a_parameter() -> None:
    graph = outcore.capture(Heads(), [(4, 8)])
    heads = [name for name, call in graph.calls.items() if _is_head(graph, call)]
    assert heads == ["plain#0", "linear()#0"]
