"""Attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.keras.carried import Weight
from outcore.keras.part import Part, Site, converts

__all__: list[str] = []


class MultiHeadAttention(nn.Module):
    """Attention of several heads, each projected by a matrix of its own.

    A query that its mask lets attend to nothing attends to everything alike, as in Keras, and no gradient goes through
    its scores; with dropout, or where scores are returned, Keras sets them to zero instead. Infinite masks would give
    NaN there, and large finite ones wrong gradients in torch, whose backward takes scores less their logarithmic sum.
    """

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear

    def __init__(
        self, sizes: dict[str, tuple[int, int]], heads: int, scale: float, dropout: float, *, bias: bool
    ) -> None:
        super().__init__()
        for name, (inputs, outputs) in sizes.items():
            setattr(self, name, nn.Linear(inputs, outputs, bias=bias))
        self.heads, self.scale, self.dropout = heads, scale, dropout

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        split: torch.Tensor = x.unflatten(-1, (self.heads, -1))
        return split.transpose(1, 2)

    def forward(
        self,
        query: torch.Tensor,
        value: torch.Tensor,
        key: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        use_causal_mask: bool = False,
        return_attention_scores: bool = False,
    ) -> Any:
        """Query, value, key: in Keras' order."""
        key = value if key is None else key
        q, k, v = self._split(self.query(query)), self._split(self.key(key)), self._split(self.value(value))
        mask = None if attention_mask is None else attention_mask.bool()
        if use_causal_mask:
            causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
            mask = causal if mask is None else mask & causal
        nothing = None
        if mask is not None:
            mask = mask.unsqueeze(1) if mask.ndim == 3 else mask
        if mask is not None and attention_mask is not None:  # a causal one leaves something to every query
            nothing = ~mask.any(-1, keepdim=True)
            q, mask = q.masked_fill(nothing, 0.0), mask | nothing
        if not return_attention_scores:
            dropped = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, mask, dropped, scale=self.scale)
            y = y.masked_fill(nothing, 0.0) if nothing is not None and self.dropout else y
            return self.output(y.transpose(1, 2).flatten(2))
        scores = (q * self.scale) @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        scores = F.softmax(scores, -1)
        scores = scores if nothing is None else scores.masked_fill(nothing, 0.0)
        y = F.dropout(scores, self.dropout, self.training) @ v
        return [self.output(y.transpose(1, 2).flatten(2)), scores]


@converts("layers.MultiHeadAttention")
def _multi_head_attention(layer: Any, site: Site) -> Part:
    if site.rank != 3:
        site.refuse(f"attention over inputs of {site.rank} dimensions", "reshape them to (batch, steps, channels)")
    if getattr(layer, "_use_gate", False) or getattr(layer, "_sliding_window", None) is not None:
        site.refuse("gates and sliding windows")
    inner = {
        "query": layer._query_dense,
        "key": layer._key_dense,
        "value": layer._value_dense,
        "output": layer._output_dense,
    }
    sizes, weights = {}, []
    for name, dense in inner.items():
        kernel = dense._kernel if hasattr(dense, "_kernel") else dense.kernel
        shape = tuple(int(n) for n in kernel.shape)
        inputs, outputs = (shape[0] * shape[1], shape[2]) if name == "output" else (shape[0], shape[1] * shape[2])
        sizes[name] = (inputs, outputs)
        weights.append(Weight(kernel, f"{name}.weight", split=(inputs, outputs), permute=(1, 0)))
        if layer._use_bias:
            weights.append(Weight(dense.bias, f"{name}.bias", merge=(outputs,)))
    scale = float(layer._inverse_sqrt_key_dim)
    module = MultiHeadAttention(sizes, layer._num_heads, scale, layer._dropout, bias=layer._use_bias)
    return Part(module, False, weights)


class Attention(nn.Module):
    """Attention without projections; additive where it has a scale per channel."""

    def __init__(self, *, additive: bool, learnt: tuple[int, ...] | None, concat: bool, dropout: float) -> None:
        super().__init__()
        self.additive, self.concat, self.dropout = additive, concat, dropout
        self.scale = None if learnt is None else nn.Parameter(torch.empty(learnt))
        self.concat_score_weight = nn.Parameter(torch.empty(())) if concat else None

    def forward(self, given: Any, return_attention_scores: bool = False, use_causal_mask: bool = False) -> Any:
        """Query, value and perhaps key, as one list."""
        query, value = given[0], given[1]
        key = given[2] if len(given) > 2 else value
        if self.additive or self.concat:
            summed = torch.tanh(
                (self.scale if self.concat and self.scale is not None else 1.0)
                * (query.unsqueeze(-2) + key.unsqueeze(-3))
            )
            if self.additive:
                scores = (summed if self.scale is None else self.scale * summed).sum(-1)
            else:
                assert self.concat_score_weight is not None
                scores = self.concat_score_weight * summed.sum(-1)
        else:
            scores = query @ key.transpose(-1, -2)
            if self.scale is not None:
                scores = scores * self.scale
        if use_causal_mask:
            causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~causal, -torch.inf)
        scores = F.softmax(scores, -1)
        y = F.dropout(scores, self.dropout, self.training) @ value
        return [y, scores] if return_attention_scores else y


@converts("layers.Attention", "layers.AdditiveAttention")
def _attention(layer: Any, site: Site) -> Part:
    additive = type(layer).__name__ == "AdditiveAttention"
    concat = not additive and layer.score_mode == "concat"
    learnt = None if layer.scale is None else tuple(int(n) for n in layer.scale.shape)
    module = Attention(additive=additive, learnt=learnt, concat=concat, dropout=layer.dropout)
    weights = [] if layer.scale is None else [Weight(layer.scale, "scale")]
    if concat:
        weights.append(Weight(layer.concat_score_weight, "concat_score_weight"))
    return Part(module, False, weights)
