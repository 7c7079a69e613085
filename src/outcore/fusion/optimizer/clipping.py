"""Gradient clipping, member by member: what ``torch.nn.utils.clip_grad_norm_`` does, with a limit for each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["clip_by_norm", "norms"]


def norms(grads: Mapping[str, Tensor]) -> Tensor:
    """The 2-norm of all gradients of each member."""
    each = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads.values()]
    total: Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
    return total


def clip_by_norm(grads: Mapping[str, Tensor], limits: Tensor) -> Tensor:
    """Scale every member's gradients to its limit where they exceed it; returns the norms before."""
    before = norms(grads)
    factors = (limits.to(before.dtype) / (before + 1e-6)).clamp(max=1.0)
    for grad in grads.values():
        grad.mul_(factors.to(grad.dtype).view(-1, *[1] * (grad.dim() - 1)))
    return before
