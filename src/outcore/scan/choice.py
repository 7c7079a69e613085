"""Scan or torch: whichever was measured to be faster for this shape on this device.

A scan does more work than a loop and pays where the loop leaves the device idle: long sequences, small
batches, small hidden sizes. Where that line runs depends on the device, on cuDNN's version and on the network
(gradients that fade within a chunk need no products), so it is measured: one forward and backward pass of
both, on the data and weights at hand, once per shape. Lengths within a factor of two share a measurement.
`choices` keeps the results; save them to skip the measuring in the next run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outcore.errors import ScanError
from outcore.scan.cells import Cell

__all__ = ["Choices", "Timing", "choices", "key_of"]

SHORTEST = 32
"""Steps below which nothing is measured: a loop this short is never worth a scan."""
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one forward and backward pass."""

    scan_s: float
    torch_s: float

    @property
    def backward(self) -> str:
        """The faster one."""
        return "scan" if self.scan_s < self.torch_s else "torch"

    def __str__(self) -> str:
        return f"scan {1e3 * self.scan_s:.3g} ms, torch {1e3 * self.torch_s:.3g} ms"


class Choices:
    """Measured timings by device and shape.

    >>> choices.save("scan.json")  # doctest: +SKIP
    >>> choices.load("scan.json")  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.timings: dict[str, Timing] = {}

    def choose(self, key: str, scan: Callable[[], Any], plain: Callable[[], Any], device: torch.device) -> Timing:
        """The timing for a key, measured if it is new; each argument runs one forward and backward pass."""
        if key not in self.timings:
            self.timings[key] = Timing(_seconds(scan, device), _seconds(plain, device))
        return self.timings[key]

    def save(self, path: str | Path) -> None:
        """Write all timings as JSON."""
        Path(path).write_text(json.dumps({k: asdict(t) for k, t in self.timings.items()}, indent=1) + "\n")

    def load(self, path: str | Path) -> None:
        """Add the timings from a file."""
        try:
            found = json.loads(Path(path).read_text())
            self.timings.update({str(k): Timing(float(t["scan_s"]), float(t["torch_s"])) for k, t in found.items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ScanError(f"{path} is no file of timings as Choices.save writes them ({error})") from None

    def clear(self) -> None:
        """Forget everything, so that it is measured again."""
        self.timings.clear()


choices = Choices()
"""The timings of this process."""


def key_of(cell: Cell, directions: int, steps: int, batch: int, x: Tensor) -> str:
    """Device and shape in words; lengths are rounded down to a power of two."""
    device = torch.cuda.get_device_name(x.device) if x.is_cuda else x.device.type
    sizes = f"input {cell.input}, hidden {cell.hidden}, projection {cell.projection}, directions {directions}"
    rounded = 1 << (steps.bit_length() - 1)
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{device}, {dtype}, {cell.kind}, {sizes}, batch {batch}, steps {rounded}"


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Shortest of a few runs after one that warms up."""
    run()
    best = float("inf")
    for _ in range(_REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
