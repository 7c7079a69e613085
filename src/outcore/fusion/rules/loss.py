"""Cross entropy of all members at once, row by row.

The scores of a language model are most of what its step moves, and come with the classes side by side in memory but
named as the second dimension, as `F.cross_entropy` wants them. vmap copies them into that order and back, and runs a
softmax along strides. Here members and positions become rows as they lie, and each member's rows are reduced apart.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from outcore.fusion.program.values import Stacked


def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Of scores ``[members, samples, classes, ...]`` and class indices, shared or stacked; other uses have no rule."""
    goal = target.tensor if isinstance(target, Stacked) else target
    usual = weight is None and size_average is None and reduce is None and not label_smoothing
    if not usual or reduction not in ("mean", "sum") or not isinstance(input, Stacked) or input.rank < 2:
        return NotImplemented
    if not isinstance(goal, torch.Tensor) or goal.is_floating_point():
        return NotImplemented
    members = input.members
    goals = goal if isinstance(target, Stacked) else goal.expand(members, *goal.shape)
    by_class = input.tensor.movedim(2, -1)
    if by_class.stride(-1) == 1:
        rows, wanted = by_class.flatten(0, -2), goals.reshape(-1)
    else:
        rows, wanted = input.tensor.flatten(0, 1), goals.flatten(0, 1)
    each = F.cross_entropy(rows, wanted, ignore_index=ignore_index, reduction="none").view(members, -1).sum(1)
    return Stacked(each if reduction == "sum" else each / (goals != ignore_index).flatten(1).sum(1))
