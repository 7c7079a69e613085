"""Embedding, attention and dropout of all members as one.

An embedding is one lookup in a table of all members' rows. A padding row has no gradient; with several members there
are several, which neither vmap nor one ``padding_idx`` can say, so the padded positions are cut from the gradient
after the lookup. Attention treats samples independently, so members are samples. Dropout draws for everything at
once, with each member's own probability, or from each member's own stream where seeds were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from outcore.fusion.program.call import FusedCall
from outcore.fusion.program.values import Stacked


def embedding(index: Any, weight: Any, padding_idx: int | None) -> Any:
    """``F.embedding`` for all members."""
    if not isinstance(weight, Stacked):
        return NotImplemented
    members, rows = weight.tensor.shape[:2]
    each = index.tensor if isinstance(index, Stacked) else index.unsqueeze(0).expand(members, *index.shape)
    start = torch.arange(0, members * rows, rows, device=each.device).view(-1, *[1] * (each.dim() - 1))
    found = F.embedding(each + start, weight.tensor.flatten(0, 1))
    if padding_idx is not None:
        pad = padding_idx % rows
        found = torch.where((each == pad).unsqueeze(-1), found.detach(), found)
    return Stacked(found)


def attention(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool, **rest: Any) -> Any:
    """``F.scaled_dot_product_attention`` for all members."""
    q, k, v, mask = query, key, value, attn_mask
    parts = (q, k, v, mask)
    if any(isinstance(p, torch.Tensor) for p in (q, k, v)):
        return NotImplemented
    batch = q.tensor.shape[1]
    if q.rank < 3 or any(p.tensor.shape[1] != batch for p in (k, v)):
        return NotImplemented
    q, k, v = (p.tensor.flatten(0, 1) for p in (q, k, v))
    if isinstance(mask, Stacked):
        own = mask.tensor.reshape(mask.members, *[1] * (q.dim() - mask.rank), *mask.tensor.shape[1:])
        mask = own.expand(mask.members, batch, *own.shape[2:]).flatten(0, 1)
    elif mask is not None and mask.dim() == q.dim() and mask.shape[0] != 1:
        mask = mask.repeat(parts[0].members, *[1] * (mask.dim() - 1))
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, **rest)
    return Stacked(y.unflatten(0, (-1, batch)))


def dropout(call: FusedCall, x: Any, rates: Sequence[float], training: bool, whole: int | None) -> Any:
    """Dropout with a probability per member; masks span what comes after the first `whole` dimensions."""
    if not training or all(rate == 0.0 for rate in rates):
        return x
    if call.randomness.per_member or min(rates) < 0 or max(rates) >= 1:
        return call.one_by_one()
    tensor = x.tensor if isinstance(x, Stacked) else x.unsqueeze(0).expand(call.members, *x.shape)
    shape = tensor.shape if whole is None else (*tensor.shape[: whole + 1], *[1] * (tensor.dim() - whole - 1))
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    draw = torch.rand_like(tensor, dtype=wide) if whole is None else torch.rand(shape, dtype=wide, device=tensor.device)
    if len(set(rates)) == 1:
        mask = (draw >= rates[0]) / (1 - rates[0])
    else:
        key = f"{call.name}: {rates}"
        if key not in call.kept:
            call.kept[key] = torch.tensor(rates, dtype=draw.dtype, device=draw.device)
        p = call.kept[key].view(-1, *[1] * (draw.dim() - 1))
        mask = (draw >= p) / (1 - p)
    call.note("fused")
    return Stacked(tensor * mask.to(tensor.dtype))
