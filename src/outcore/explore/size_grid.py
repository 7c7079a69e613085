"""Time and memory of a step over batch sizes and image sizes, predicted ahead so that a page can follow a handle.

Every cell is a prediction of its own (`outcore.cost.profile`): nothing is run, a cell takes about a second. The job's
own row and column come first, which is where the handles move; the others are filled in from the nearest outwards until
the time is up, and where one is missing the page multiplies along the row and the column, and says so.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from outcore.cost.profile import Profile, profile
from outcore.errors import OutcoreError
from outcore.job import Job
from outcore.machine import Device

__all__ = ["SizeGrid", "predict_sizes"]

_MOST_BATCHES, _MOST_IMAGES = 9, 7
_BEYOND = 1.6
"""Sizes are shown up to the first that takes so many times the device's memory."""
_LARGEST = 1 << 16


@dataclass
class SizeGrid:
    """Predictions by batch size and longest side of the images."""

    own: tuple[int, int | None]
    """The job's own batch and image."""
    batches: list[int] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    """Empty if the inputs are not images, or have one size only."""
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    """``batch x image`` -> seconds, their interval, bytes, bytes by kind."""
    notes: list[str] = field(default_factory=list)

    def add(self, batch: int, image: int | None, found: Profile) -> None:
        """Note a prediction."""
        low, high = found.step.interval_s
        self.cells[f"{batch}x{image or self.own[1] or 0}"] = {
            "step_s": float(f"{found.step.step_s:.6g}"),
            "low_s": float(f"{low:.6g}"),
            "high_s": float(f"{high:.6g}"),
            "peak_bytes": found.memory.peak_bytes,
            "by_kind": list(asdict(found.memory.at_peak).values()),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"own": list(self.own)}


def predict_sizes(job: Job, device: Device, own: Profile, *, seconds: float, batch: int) -> Iterator[SizeGrid]:
    """The grid, again and again with more cells; the last has all that the time allowed.

    Args:
        job: what is trained.
        device: on what.
        own: the profile of the job's own size.
        seconds: to spend.
        batch: the job's own batch.
    """
    until = time.monotonic() + seconds
    side = image_side(job, batch)
    grid = SizeGrid((batch, side))
    grid.add(batch, None, own)

    def peak(size: int, image: int | None) -> int | None:
        """Predict a cell; none if the model does not take it."""
        try:
            found = profile(job, device, size=size, image=image)
        except (OutcoreError, NotImplementedError, RuntimeError, ValueError) as error:
            lines = str(error).splitlines()
            what = f"image {image}" if image else f"batch {size}"
            grid.notes.append(f"{what}: {lines[0] if lines else type(error).__name__}")
            return None
        grid.add(size, image, found)
        return found.memory.peak_bytes

    limit = _BEYOND * device.memory_bytes
    grid.batches, grid.images = [batch], [side] if side is not None else []
    refused = 0
    for axis, size in _in_turn(batch, side):
        if time.monotonic() > until:
            return
        if axis == "batch":
            over = [b for b in grid.batches if _peak(grid, b, side) > limit]
            if len(grid.batches) >= _MOST_BATCHES or (len(grid.batches) > 1 and size > min(over, default=_LARGEST)):
                continue
            if peak(size, None) is not None:
                grid.batches = sorted({*grid.batches, size})
                yield grid
        else:
            over = [s for s in grid.images if _peak(grid, batch, s) > limit]
            if len(grid.images) >= _MOST_IMAGES or refused > 1 or (size > min(over, default=_LARGEST)):
                continue
            if peak(batch, size) is None:
                refused += 1
                continue
            grid.images = sorted({*grid.images, size})
            yield grid
    if side is None:
        return
    missing = [(b, s) for b in grid.batches for s in grid.images if f"{b}x{s}" not in grid.cells]
    steps = {size: i for sizes in (grid.batches, grid.images) for i, size in enumerate(sizes)}
    missing.sort(key=lambda cell: abs(steps[cell[0]] - steps[batch]) + abs(steps[cell[1]] - steps[side]))
    for b, s in missing:
        if time.monotonic() > until:
            break
        peak(b, s)
        yield grid


def image_side(job: Job, batch: int) -> int | None:
    """The longest side of the job's images; none if its inputs are not images."""
    try:
        args, kwargs, _ = job.example(batch, "meta")
    except (OutcoreError, NotImplementedError, RuntimeError):
        return None
    images = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim() >= 4]
    return max(max(images, key=torch.Tensor.numel).shape[2:]) if images else None


def _batches(own: int) -> list[int]:
    """Sizes around the job's own: smaller ones at most four times, then larger ones without end."""
    smaller = [own // 2**k for k in range(1, 12) if own // 2**k >= 1]
    chosen = smaller[:2] + ([smaller[-1]] if len(smaller) > 2 else [])
    if len(smaller) > 4:
        chosen.insert(2, smaller[len(smaller) // 2])
    larger = [own * 2**k for k in range(1, 12) if own * 2**k <= _LARGEST]
    return [*larger[:1], *dict.fromkeys(chosen), *larger[1:]]


def _sides(own: int) -> list[int]:
    """Sides around the job's own that are as divisible as it is, up to 32."""
    multiple = min(32, own & -own)
    factors = (0.5, 2.0, 1.5, 0.25, 4.0, 3.0, 8.0)
    sides = [max(1, round(own * f / multiple)) * multiple for f in factors]
    return [side for side in dict.fromkeys(sides) if side != own and side <= _LARGEST]


def _in_turn(batch: int, side: int | None) -> Iterator[tuple[str, int]]:
    """Batches and images by turns, the nearest first."""
    batches = [("batch", size) for size in _batches(batch)]
    images = [("image", size) for size in _sides(side)] if side is not None else []
    for pair in itertools.zip_longest(batches, images):
        yield from (one for one in pair if one is not None)


def _peak(grid: SizeGrid, batch: int, image: int | None) -> int:
    cell = grid.cells.get(f"{batch}x{image or 0}")
    return int(cell["peak_bytes"]) if cell is not None else 0
