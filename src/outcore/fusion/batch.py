"""A batch as an array takes it: one for all members, or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outcore.errors import FuseError
from outcore.fusion.program.values import Stacked
from outcore.graph.structure import leaves, substitute

__all__ = ["arguments"]


def arguments(
    batch: tuple[Any, ...],
    each: Sequence[tuple[Any, ...]] | None,
    *,
    members: int,
    whole: bool,
    device: torch.device,
    channels_last: bool,
) -> tuple[Any, ...]:
    """The arguments of `Training` with tensors on the device; `whole` batches go to the loss as they are."""
    if (each is None) == (not batch):
        raise FuseError("give one batch for all, array.step(x, y), or one for each: array.step(each=[(x0, y0), …])")

    def placed(tensor: Tensor) -> Tensor:
        image = channels_last and tensor.dim() == 4 and tensor.is_floating_point()
        moved = tensor.to(device, non_blocking=True)
        return moved.contiguous(memory_format=torch.channels_last) if image else moved

    if each is None:
        shared: tuple[Any, ...] = substitute(_as_called(batch, whole), Tensor, placed)
        return shared
    if len(each) != members:
        raise FuseError(f"each has {len(each)} batches, there are {members} members")
    called = [substitute(_as_called(tuple(b), whole), Tensor, placed) for b in each]
    columns = [[t for _, t in leaves(c, Tensor)] for c in called]
    if len({tuple(t.shape for t in column) for column in columns}) > 1:
        raise FuseError("the members' batches differ in shape; members of one array need equal batch shapes")
    joined = iter([Stacked(torch.stack(row)) for row in zip(*columns, strict=True)])
    filled: tuple[Any, ...] = substitute(called[0], Tensor, lambda _: next(joined))
    return filled


def _as_called(batch: tuple[Any, ...], whole: bool) -> tuple[Any, ...]:
    if whole:
        return (tuple(batch),)
    inputs, *targets = batch
    if len(targets) > 1:
        raise FuseError(f"a batch is inputs and targets, not {len(batch)} things; put several inputs in a tuple")
    return (inputs if isinstance(inputs, tuple | dict) else (inputs,), *targets)
