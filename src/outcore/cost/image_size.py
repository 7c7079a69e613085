"""Batches whose images get another size.

Whatever has the height and width (and depth) of the largest input is an image or a map of one: inputs, masks, targets.
What the new images hold is the caller's choice: a crop, repeated pixels, or no memory at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from outcore.errors import JobError

Change = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]
"""From a tensor, the height and width that it ends with and those it is to end with, to the new tensor."""


def image_shape(inputs: Any) -> torch.Size | None:
    """Height and width (and depth) of the largest image among the inputs; none if there is no image."""
    images = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.dim() >= 4]
    return max(images, key=torch.Tensor.numel).shape[2:] if images else None


def with_longest_side(batch: Any, inputs: Any, side: int, change: Change) -> Any:
    """The batch with everything changed that has the size of the largest image of `inputs`, in proportion to `side`.

    Raises:
        JobError: no input is an image, or no tensor can hold one of that size.
    """
    shape = image_shape(inputs)
    if shape is None:
        raise JobError("no input has the shape of an image (batch, channels, height, width); leave out --image")
    if side >= 2**63:
        raise _too_large(side)
    wanted = [max(1, round(n * side / max(shape))) for n in shape]

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() <= len(shape) or leaf.shape[-len(shape) :] != shape:
            return leaf
        if math.prod(wanted) * math.prod(leaf.shape[: -len(shape)]) * leaf.element_size() >= 2**63:
            raise _too_large(side)
        return change(leaf, shape, wanted)

    return tree_map(changed, batch)


def _too_large(side: int) -> JobError:
    return JobError(f"an image of {side:,} px has more numbers than a tensor can have; give a smaller --image")
