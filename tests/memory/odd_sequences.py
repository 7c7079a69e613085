"""Odd networks over rows of features: recurrent layers, attention, convolutions in time, and what stands between them.

Sequences of one, single features, masks, shared layers, gates, and layers whose results are tuples. Each number is
another network.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..foreign.foreign import Foreign, integers
from .odd_networks import Chain, Draw, Piece

_WORDS = 11


def odd_sequence(number: int) -> Foreign:
    """A network over sequences of words."""
    length = _Draw(number).length()

    def build() -> nn.Module:
        return _Reader(_Draw(number))

    return Foreign(f"odd sequence/{number}", build, lambda batch: ((integers(_WORDS, batch, length),), {}), quick=True)


class _Reader(nn.Module):
    """Words, a chain, and as many scores as there are words, from the same weights where that fits."""

    def __init__(self, draw: _Draw) -> None:
        super().__init__()
        length, width = draw.length(), draw.one(1, 4, 8)
        self.words = nn.Embedding(_WORDS, width)
        self.chain = Chain(draw, torch.zeros(2, length, width))
        made = self.chain.made.shape[-1]
        self.head = nn.Linear(made, _WORDS)
        if made == width and draw.likely(0.5):
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.chain(self.words(words))).log_softmax(-1)


class _Recurrent(nn.Module):
    """The outputs of a recurrent layer, and its last state with them."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.layer(x)
        last = state[0] if isinstance(state, tuple) else state
        return out + last.mean(0).mean(-1)[:, None, None]


class _Attends(nn.Module):
    def __init__(self, layer: nn.MultiheadAttention, causal: bool) -> None:
        super().__init__()
        self.layer, self.causal = layer, causal

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1) if self.causal else None
        return self.layer(x, x, x, attn_mask=mask, need_weights=not self.causal)[0]


class _Draw(Draw):
    def length(self) -> int:
        return self.one(1, 2, 7, 16)

    def piece(self, shape: tuple[int, ...]) -> Piece:
        """What comes next."""
        kinds = (self.linear, self.norm, self.recurrent, self.attention, self.in_time, self.gate, self.noise, self.step)
        return self.one(*kinds)(*shape)

    def linear(self, length: int, width: int) -> Piece:
        part = nn.Sequential(nn.Linear(width, self.one(1, 4, 8)), self.one(nn.ReLU(), nn.GELU(), nn.Tanh()))
        return part, part.requires_grad_(self.likely(0.85))

    def norm(self, length: int, width: int) -> Piece:
        part = self.one(nn.LayerNorm(width), nn.RMSNorm(width), nn.LayerNorm((length, width)), nn.BatchNorm1d(length))
        return part, part

    def recurrent(self, length: int, width: int) -> Piece:
        kind = self.one(nn.LSTM, nn.GRU, nn.RNN)
        layers = self.one(1, 1, 2)
        settings: dict[str, Any] = {"num_layers": layers, "dropout": 0.2 if layers > 1 else 0.0}
        part = _Recurrent(kind(width, self.one(1, 4), batch_first=True, bidirectional=self.likely(0.3), **settings))
        return part, part

    def attention(self, length: int, width: int) -> Piece:
        heads, drops = self.one(1, 2) if width % 2 == 0 else 1, self.one(0.0, 0.2)
        if self.likely(0.4):
            layer: nn.Module = nn.TransformerEncoderLayer(width, heads, 2 * width, drops, batch_first=True)
            return layer, layer
        part = _Attends(nn.MultiheadAttention(width, heads, drops, batch_first=True), self.likely(0.5))
        return part, part

    def in_time(self, length: int, width: int) -> Piece:
        part = self.one(
            nn.Conv1d(width, self.one(1, 8), 3, padding=1), nn.Conv1d(width, width, 3, padding=1, groups=width),
            nn.MaxPool1d(min(2, length)), nn.AvgPool1d(min(3, length), 1), nn.BatchNorm1d(width),
        )  # fmt: skip
        return lambda x: part(x.transpose(1, 2)).transpose(1, 2), part

    def gate(self, length: int, width: int) -> Piece:
        part = nn.Linear(width, 2 * width)

        def gated(x: Tensor) -> Tensor:
            a, b = part(x).chunk(2, -1)
            return a * b.sigmoid()

        return self.one(gated, lambda x: F.glu(part(x), -1)), part

    def noise(self, length: int, width: int) -> Piece:
        part = self.one(nn.Dropout(0.3), nn.Dropout(0.3, inplace=True), nn.Dropout1d(0.3))
        kept = self.one(0.5, 0.9)

        def dropped_path(x: Tensor) -> Tensor:
            return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(kept).div_(kept)

        return (dropped_path, None) if self.likely(0.3) else (part, part)

    def step(self, length: int, width: int) -> Piece:
        return self.one(
            lambda x: x.softmax(1),
            lambda x: x.cumsum(1),
            lambda x: x.masked_fill(x < 0, 0.0),
            lambda x: torch.einsum("btc,bsc->bts", x, x) @ x,
            lambda x: F.normalize(x, dim=-1),
            lambda x: torch.where(x > 0, x, x.exp() - 1),
            lambda x: torch.stack(list(x.unbind(1))[::-1], 1),
            lambda x: x.roll(1, 1) - x,
        ), None
