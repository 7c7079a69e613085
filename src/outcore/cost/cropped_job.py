"""A crop of a job's images on which both plain PyTorch and a plan can be tried within a minute.

A plan names values, not sizes, so what it does to a network is seen on a small image too. The crop is the largest of
half, a quarter, an eighth … of the whole whose plain step needs little memory and little work; whether the network
takes an image of that size is found by capturing it, which costs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from outcore.cost.image_size import image_shape, with_longest_side
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.step_memory import memory_curve
from outcore.errors import OutcoreError
from outcore.graph import Graph, capture
from outcore.job import Job
from outcore.machine.units import format_bytes

_MOST_BYTES = {"cpu": 2 * 2**30, "cuda": 16 * 2**30}
_MOST_FLOPS = {"cpu": 6e11, "cuda": 1e14}
_LEAST_SIDE = 16


def fitting_side(job: Job, graph: Graph, size: int | None, device: torch.device) -> int | None:
    """The longest side of the images to verify with; none if the whole ones are small enough.

    Args:
        job: the job.
        graph: of its model on whole images.
        size: of the batch.
        device: where both ways are to be tried.

    Raises:
        OutcoreError: they are not, and no crop will do.
    """
    if not (needed := _too_much(graph, device)):
        return None
    batch = _anywhere(job, size)
    whole = longest_side(batch)
    side = whole // 2 if whole is not None else 0
    while whole is not None and side >= _LEAST_SIDE:
        with contextlib.suppress(Exception):  # whatever a model does with an image of a size it was not made for
            model = job.build("meta").train()
            args, kwargs, _ = crop_batch(batch, side)
            if not _too_much(capture(model, args, kwargs), device):
                return side
        side //= 2
    why = f"no image that the model takes is smaller than {whole} px" if whole is not None else "it takes no images"
    raise OutcoreError(
        f"a plain step of {job.name} is too large to be tried here: {needed}; {why}; give a smaller batch"
    )


def longest_side(batch: Any) -> int | None:
    """The longest side of the largest image among the inputs; none if there is no image."""
    shape = image_shape(batch[:2])
    return max(shape) if shape is not None else None


def crop_batch(batch: Any, side: int) -> Any:
    """The middle of everything that has the height and width of the largest input, in proportion.

    >>> args, kwargs, target = crop_batch(((torch.zeros(1, 3, 64, 32),), {}, torch.zeros(1, 64, 32)), 16)
    >>> tuple(args[0].shape), tuple(target.shape)
    ((1, 3, 16, 8), (1, 16, 8))
    """
    if (whole := longest_side(batch)) is not None and side > whole:
        raise OutcoreError(f"images of {whole} px cannot be cropped to {side:,} px; give --image {whole} or less")
    return with_longest_side(batch, batch[:2], side, _middle)


def _middle(leaf: torch.Tensor, shape: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    for i, (whole, part) in enumerate(zip(shape, wanted, strict=True)):
        leaf = leaf.narrow(i - len(shape), (whole - part) // 2, part)
    return leaf.contiguous()


def _anywhere(job: Job, size: int | None) -> Any:
    """A batch without memory, or a real one where that cannot be."""
    try:
        return job.example(size, "meta")
    except Exception:
        return job.example(size)


def _too_much(graph: Graph, device: torch.device) -> str:
    """What of a plain step is more than there should be; nothing if it will do."""
    costs = account(graph)
    peak = memory_curve(graph, costs, optimizer=2.0).peak_bytes
    work = sum(c.flops_forward + c.flops_backward for c in costs.calls.values())
    if peak > _MOST_BYTES.get(device.type, 2**31):
        return f"{format_bytes(peak)} of memory"
    return f"{work:.1e} operations" if work > _MOST_FLOPS.get(device.type, 6e11) else ""
