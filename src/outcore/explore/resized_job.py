"""A job whose images have another size, so that everything the page shows can be asked for that size.

Inputs and targets that have the height and width (and depth) of the largest input are repeated or cut at their end:
every number in the result stood in the batch, so class numbers stay class numbers, and nothing is computed on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from outcore.cost.image_size import with_longest_side
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
    return with_longest_side(tuple(batch), batch[0], side, _repeated)


def _repeated(leaf: torch.Tensor, shape: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    for place, (have, want) in enumerate(zip(shape, wanted, strict=True), start=-len(shape)):
        leaf = leaf.index_select(place, torch.arange(want, device=leaf.device) % have)
    return leaf
