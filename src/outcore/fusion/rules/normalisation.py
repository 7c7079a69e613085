"""Normalisations of all members as one.

What normalises each channel, or groups of channels, of a batch runs on ``members * channels`` channels; the running
statistics of all members are one flat view of the stacked buffers, so one kernel updates them. What normalises the
last dimensions runs without weights on everything at once, then each member's weights are applied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from outcore.fusion.program.values import Stacked, fold_channels, unfold_channels


def _flat(value: Any) -> torch.Tensor | None:
    return value.tensor.flatten() if isinstance(value, Stacked) else None


def _all_stacked(*values: Any) -> bool:
    return all(value is None or isinstance(value, Stacked) for value in values)


def batch_norm(
    input: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    """``F.batch_norm`` for all members."""
    x, mean, var = input, running_mean, running_var
    if not _all_stacked(mean, var, weight, bias):
        return NotImplemented
    members = next((v.members for v in (mean, weight, x) if isinstance(v, Stacked)), 0)
    if not isinstance(x, Stacked):
        x = Stacked(x.unsqueeze(0).expand(members, *x.shape))
    state = (_view(mean), _view(var), _flat(weight), _flat(bias), training, momentum, eps)
    rows = x.tensor.movedim((0, 2), (-2, -1))  # [N, *space, B, C]
    if x.rank == 3 and rows.is_contiguous():
        # Channels last in one dimension, as a 1x1 convolution leaves it: torch has no such format, but it has rows.
        flat = F.batch_norm(rows.flatten(-2).flatten(0, -2), *state)
        return Stacked(flat.view(rows.shape).movedim((-2, -1), (0, 2)))
    return unfold_channels(F.batch_norm(fold_channels(x), *state), members)


def instance_norm(
    x: Any, mean: Any, var: Any, weight: Any, bias: Any, use_input_stats: bool, momentum: float, eps: float
) -> Any:
    """``F.instance_norm`` for all members."""
    if not isinstance(x, Stacked) or not _all_stacked(mean, var, weight, bias):
        return NotImplemented
    y = F.instance_norm(
        fold_channels(x), _view(mean), _view(var), _flat(weight), _flat(bias), use_input_stats, momentum, eps
    )
    return unfold_channels(y, x.members)


def group_norm(input: Any, num_groups: int, weight: Any, bias: Any, eps: float) -> Any:
    """``F.group_norm`` for all members."""
    x, groups = input, num_groups
    if not isinstance(x, Stacked) or x.rank < 2 or not _all_stacked(weight, bias):
        return NotImplemented
    y = F.group_norm(fold_channels(x), groups * x.members, _flat(weight), _flat(bias), eps)
    return unfold_channels(y, x.members)


def layer_norm(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """``F.layer_norm`` for all members."""
    return _last_dims_norm(F.layer_norm, input, normalized_shape, weight, bias, eps)


def rms_norm(input: Any, normalized_shape: Any, weight: Any, eps: float | None) -> Any:
    """``F.rms_norm`` for all members."""
    return _last_dims_norm(F.rms_norm, input, normalized_shape, weight, None, eps)


def _last_dims_norm(norm: Any, x: Any, shape: Any, weight: Any, bias: Any, eps: Any) -> Any:
    if not isinstance(x, Stacked) or not _all_stacked(weight, bias):
        return NotImplemented
    y = norm(x.tensor, shape, eps=eps)
    if weight is None:
        return Stacked(y)
    aligned = [_align(v, x.rank) for v in (weight, bias) if v is not None]
    return Stacked(torch.addcmul(aligned[1], y, aligned[0]) if len(aligned) == 2 else y * aligned[0])


def _align(value: Stacked, rank: int) -> torch.Tensor:
    members, shape = value.members, value.tensor.shape[1:]
    return value.tensor.reshape(members, *[1] * (rank - len(shape)), *shape)


def _view(value: Any) -> torch.Tensor | None:
    """Running statistics: a view, since they are written."""
    return value.tensor.view(-1) if isinstance(value, Stacked) else None
