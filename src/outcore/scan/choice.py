"""Scan or torch: whichever was measured to be faster for this shape on this device.

A scan does more work than a loop and pays where the loop leaves the device idle: long sequences, small batches,
small hidden sizes. Where that line runs depends on the device, on cuDNN's version and on the network (gradients that
fade within a chunk need no products), so it is measured: one forward and backward pass of each, on the data and
weights at hand, once per shape. Lengths within a factor of two share a measurement.

Whether gradients fade may change while a network learns, so the scan is timed with products too. Where only the
quicker way pays, a layer goes back to torch when that stops working, and tries again later.

`choices` keeps the results; save them to skip the measuring in the next run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outcore.documents.reading import read_json
from outcore.documents.schema import MapOf
from outcore.documents.typed_schema import schema_of
from outcore.errors import ScanError
from outcore.machine.clock import wall_s
from outcore.scan.cells import CellShape

SHORTEST = 32
"""Steps below which nothing is measured: a loop this short is never worth a scan."""
MARGIN = 0.85
"""The scan must be faster by this factor: what is measured varies, and torch's way is the known one."""
RETRY = 64
"""Calls after which a layer whose gradients did not fade is tried again."""
_REPEATS, _SHORT_REPEATS, _SHORT_S = 3, 7, 0.02
"""Runs of each that are timed, and of those that take less than so many seconds, which vary with the host."""
Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class ScanTiming:
    """Seconds of one forward and backward pass."""

    scan_s: float
    """As the scan would run now."""
    products_s: float
    """If it had to multiply Jacobians out."""
    torch_s: float

    def choose(self, settled: bool) -> tuple[str, str]:
        """Which to take, and why.

        Args:
            settled: whether relaxation was enough in the last scanned call.
        """
        if self.scan_s >= MARGIN * self.torch_s:
            return "torch", f"measured {self}"
        if not settled and self.products_s >= MARGIN * self.torch_s:
            return "torch", f"gradients no longer fade within a chunk, and products are slower: measured {self}"
        return "scan", f"measured {self}"

    def __str__(self) -> str:
        scan, products, plain = (f"{1e3 * s:.3g} ms" for s in (self.scan_s, self.products_s, self.torch_s))
        return f"scan {scan} ({products} with products), torch {plain}"


class Choices:
    """Measured timings by device and shape.

    >>> choices.save("scan.json")  # doctest: +SKIP
    >>> choices.load("scan.json")  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.timings: dict[str, ScanTiming] = {}

    def measure(self, key: str, scan: Run, products: Run, plain: Run, device: torch.device) -> ScanTiming:
        """Time a shape; each argument runs one forward and backward pass."""
        self.timings[key] = ScanTiming(*_seconds((scan, products, plain), device))
        return self.timings[key]

    def save(self, path: str | Path) -> None:
        """Write all timings as JSON."""
        Path(path).write_text(
            json.dumps({k: asdict(t) for k, t in self.timings.items()}, indent=1) + "\n", encoding="utf-8"
        )

    def load(self, path: str | Path) -> None:
        """Add the timings from a file."""
        found = read_json(path, MapOf(schema_of(ScanTiming)), ScanError)
        self.timings.update({name: ScanTiming(**timing) for name, timing in found.items()})

    def clear(self) -> None:
        """Forget everything, so that it is measured again."""
        self.timings.clear()


choices = Choices()
"""The timings of this process."""


@functools.cache
def key_of(cell: CellShape, directions: int, steps: int, batch: int, at: torch.device, precision: torch.dtype) -> str:
    """Device and shape in words; lengths are rounded down to a power of two."""
    device = torch.cuda.get_device_name(at) if at.type == "cuda" else at.type
    sizes = f"input {cell.input}, hidden {cell.hidden}, projection {cell.projection}, directions {directions}"
    rounded = 1 << (steps.bit_length() - 1)
    dtype = str(precision).removeprefix("torch.")
    return f"{device}, {dtype}, {cell.kind}, {sizes}, batch {batch}, steps {rounded}"


def _seconds(runs: tuple[Run, ...], device: torch.device) -> list[float]:
    """The shortest time of each, after one run that warms up; in turns, so that a slow moment meets all of them."""
    best = [min(wall_s(run, device), wall_s(run, device)) for run in runs]
    for _ in range((_SHORT_REPEATS if max(best) < _SHORT_S else _REPEATS) - 1):
        best = [min(least, wall_s(run, device)) for least, run in zip(best, runs, strict=True)]
    return best
