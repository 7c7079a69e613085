"""A job whose images have another size, so that everything the page shows can be asked for that size.

Inputs and targets that have the height and width (and depth) of the largest input are repeated or cut at their end:
every number in the result stood in the batch, so class numbers stay class numbers, and nothing is computed on them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from outcore.errors import OutcoreError
from outcore.job import Job

__all__ = ["resized_batch", "resized_job"]


def resized_job(job: Job, side: int) -> Job:
    """The job with images whose longest side is given."""
    return replace(job, batch=lambda size: resized_batch(job.batch(size), side))


def resized_batch(batch: Any, side: int) -> Any:
    """A batch of another image size.

    >>> images, labels = resized_batch((torch.zeros(2, 3, 8, 4), torch.zeros(2, 8, 4)), 16)
    >>> tuple(images.shape), tuple(labels.shape)
    ((2, 3, 16, 8), (2, 16, 8))

    Raises:
        OutcoreError: no input is an image.
    """
    inputs = batch[0]
    images = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.dim() >= 4]
    if not images:
        raise OutcoreError("no input has the shape of an image (batch, channels, height, width); leave out --image")
    shape = max(images, key=torch.Tensor.numel).shape[2:]
    wanted = [max(1, round(n * side / max(shape))) for n in shape]

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() <= len(shape) or leaf.shape[-len(shape) :] != shape:
            return leaf
        for place, (have, want) in enumerate(zip(shape, wanted, strict=True), start=-len(shape)):
            leaf = leaf.index_select(place, torch.arange(want, device=leaf.device) % have)
        return leaf

    return tree_map(resize, tuple(batch))
