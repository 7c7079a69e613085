"""Sizes of images that a network accepts.

A U-Net of four levels takes images whose sides are multiples of 16, and fails with a sentence about two tensors for all
others. Which multiple a network needs is found by recording it, which costs a fraction of a second and no memory: the
smallest power of two an odd multiple of which is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

from outcore.cost.predicted.scaling import Scaling, SizePoint, ladder
from outcore.cost.profile import profile
from outcore.cost.training_network import capture_training
from outcore.errors import OutcoreError
from outcore.job import Job
from outcore.machine import Device

__all__ = ["multiple_of", "rounded", "scale_images"]

_TRIED = (1, 2, 4, 8, 16, 32, 64, 128)
_MOST = 1 << 16


def multiple_of(job: Job, size: int | None, side: int) -> int:
    """What the sides of images must be multiples of; 1 if any size is accepted, or nothing was found."""
    for multiple in _TRIED:
        odd = max(1, round(side / multiple)) // 2 * 2 + 1
        try:
            capture_training(job, size, image=odd * multiple)
        except OutcoreError:
            continue
        return multiple
    return 1


def rounded(side: int, multiple: int) -> int:
    """The nearest multiple, at least one.

    >>> rounded(100, 16), rounded(250, 16), rounded(3, 16), rounded(100, 1)
    (96, 256, 16, 100)
    """
    return max(1, round(side / multiple)) * multiple


def scale_images(job: Job, device: Device, sides: Sequence[int], size: int | None, multiple: int) -> Scaling:
    """Time and memory over image sizes, all of them multiples, up to the largest that fits.

    Args:
        job: what is trained.
        device: on what.
        sides: longest sides that are predicted in any case.
        size: of the batch.
        multiple: of what sides must be.
    """

    def predict(count: int) -> SizePoint:
        side = count * multiple
        found = profile(job, device, size=size, image=side)
        return SizePoint(side, found.step.step_s, *found.step.interval_s, found.memory.peak_bytes, found.size)

    counts = sorted({rounded(side, multiple) // multiple for side in sides})
    found = ladder("image", counts, predict, device.memory_bytes, most=_MOST // multiple)
    failures = {count * multiple: reason for count, reason in found.failures.items()}
    return Scaling("image", found.points, found.capacity_bytes, found.largest * multiple, failures)
