"""A value that differs from member to member.

While a recording is replayed for all members at once, each of its values is either *shared*, a plain tensor that is
the same for all (the batch, a mask, a position index), or *stacked*: one tensor with the members along its first
dimension. Shape and meaning are always ``[members, ...]``; the strides say how it lies in memory. Convolutions leave
it as ``[batch, members, channels, ...]``, matrix products as ``[members, batch, ...]``, and what follows takes
either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outcore.graph.structure import leaves, substitute


@dataclass(frozen=True, slots=True, eq=False)
class Stacked:
    """One tensor for all members."""

    tensor: torch.Tensor

    @property
    def members(self) -> int:
        """How many."""
        return self.tensor.shape[0]

    @property
    def rank(self) -> int:
        """Dimensions of one member's value."""
        return self.tensor.dim() - 1


@dataclass(frozen=True, slots=True, eq=False)
class UnjoinedConcat:
    """Parts of one value along its channels, left apart (`outcore.fusion.program.concat_conv`)."""

    parts: tuple[Stacked, ...]


def is_repeated(part: Stacked) -> bool:
    """Whether ``[B, N, C, *space]`` is one position, seen again and again."""
    space = list(zip(part.tensor.shape[3:], part.tensor.stride()[3:], strict=True))
    return any(size > 1 for size, _ in space) and all(size == 1 or stride == 0 for size, stride in space)


def is_stacked(tree: Any) -> bool:
    """Whether anything in a structure differs from member to member."""
    return next(leaves(tree, Stacked), None) is not None


def member_of(tree: Any, slot: int) -> Any:
    """One member's view of a structure."""
    return substitute(tree, Stacked, lambda s: s.tensor[slot])


def stack_results(results: Sequence[Any]) -> Any:
    """What members returned one by one, as one structure of stacked values."""
    columns = [[tensor for _, tensor in leaves(result, torch.Tensor)] for result in results]
    joined = iter([Stacked(torch.stack(list(row))) for row in zip(*columns, strict=True)])
    return substitute(results[0], torch.Tensor, lambda _: next(joined))


def fold_channels(x: Stacked) -> torch.Tensor:
    """``[B, N, C, ...]`` as ``[N, B * C, ...]``: for whatever treats channels independently, or in groups."""
    members, batch, channels = x.tensor.shape[:3]
    return x.tensor.transpose(0, 1).reshape(batch, members * channels, *x.tensor.shape[3:])


def unfold_channels(y: torch.Tensor, members: int) -> Stacked:
    """Back from `fold_channels`, without a copy."""
    return Stacked(y.unflatten(1, (members, -1)).transpose(0, 1))
