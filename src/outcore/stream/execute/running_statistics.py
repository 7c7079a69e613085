"""Running statistics of batch norms, updated once per step, as torch does."""

from __future__ import annotations

from typing import Any

import torch

from outcore.stream.rules.normalise import Norm


@torch.no_grad()
def update_statistics(norm: Norm, moments: torch.Tensor, count: int) -> None:
    """Update the running mean and (unbiased) variance of a batch norm with those of this step."""
    m: Any = norm.module
    if m is None or not m.training or not m.track_running_stats or m.running_mean is None:
        return
    if m.num_batches_tracked is not None:
        m.num_batches_tracked.add_(1)
    factor = 1.0 / float(m.num_batches_tracked) if m.momentum is None else m.momentum
    mean, variance = moments[0].flatten(), moments[1].flatten() * (count / max(1, count - 1))
    m.running_mean.mul_(1 - factor).add_(mean.to(m.running_mean.dtype), alpha=factor)
    m.running_var.mul_(1 - factor).add_(variance.to(m.running_var.dtype), alpha=factor)
