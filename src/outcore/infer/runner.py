"""Slides one after the other through one network, each within the budget.

The fit for an image of one size (`outcore.infer.fit`) is used for all of that size, so a folder of thousands of small
images is planned once.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from outcore.data import Batch, Slide, open_slide
from outcore.data.limits import limits
from outcore.data.slide import OnDamage
from outcore.errors import DataError
from outcore.infer.fit import Fitted, bound_cache, decoding_bytes, fit
from outcore.infer.network import InferNetwork
from outcore.infer.one_slide import MapOutputs, Report, class_scores, infer_map
from outcore.infer.partial import full_disk_named
from outcore.infer.process_memory import ProcessMemory
from outcore.machine.units import format_bytes, parse_bytes
from outcore.train.run_folder.trained import read_image

__all__ = ["Opened", "SlideRunner"]

_FITTED = 16
"""Sizes that are remembered."""


@dataclass(frozen=True)
class Opened:
    """A slide, the input that is made of it, and how the network runs on it."""

    path: Path
    slide: Slide
    image: Batch
    fitted: Fitted

    def __str__(self) -> str:
        size = " x ".join(map(str, self.image.shape[:1:-1]))
        held = f"with reading {format_bytes(self.fitted.peak_bytes)}"
        return f"{self.path}: {size} px; {self.fitted.plan}, {held}"


@dataclass
class SlideRunner:
    """A network and how it may be run."""

    network: InferNetwork
    memory: str = "2GiB"
    statistics: bool = False
    workers: int = 2
    on_damage: OnDamage = "raise"
    _fitted: dict[Hashable, Fitted] = field(default_factory=dict, repr=False)

    def open(self, path: Path) -> Opened:
        """Open a slide and choose how to run it.

        Raises:
            DataError: it cannot be read, or would take more than the budget.
            PlanError: the network does not fit into the budget.
        """
        budget = parse_bytes(self.memory)
        with limits.at_most(budget):
            slide = open_slide(path, on_damage=self.on_damage)
        self._check_resize(slide, budget)
        image = read_image(slide, self.network.data)
        key = (image.shape, image.sources[0].dtype, decoding_bytes(slide), slide.layout.format == "image")
        if key not in self._fitted:
            while len(self._fitted) >= _FITTED:
                del self._fitted[next(iter(self._fitted))]
            self._fitted[key] = fit(
                self.network, slide, image, memory_bytes=budget, statistics=self.statistics, workers=self.workers
            )
        fitted = self._fitted[key]
        bound_cache(fitted)
        return Opened(path, slide, image, fitted)

    def run(
        self, opened: Opened, outputs: Callable[[], MapOutputs], report: Report = lambda done, total: None
    ) -> dict[str, Any]:
        """Run the network; the results as a row. `outputs` is asked for only where there is a map."""
        start = time.perf_counter()
        with torch.no_grad(), ProcessMemory() as held, full_disk_named():
            if opened.fitted.is_map:
                about = {"slide": _stamp(opened.path), "weights": self._digest}
                row = infer_map(
                    self.network, opened.fitted, opened.slide, opened.image, outputs(), about=about, report=report
                )
            else:
                row = class_scores(self.network, opened.fitted.streamed(opened.image))
        return row | {
            "data": str(opened.path),
            "damaged_tiles": len(opened.slide.damage),
            "time_s": time.perf_counter() - start,
            "predicted_bytes": opened.fitted.peak_bytes,
            "process_bytes": held.peak_bytes,
            "process_bytes_before": held.before_bytes,
        }

    @cached_property
    def _digest(self) -> str:
        return self.network.weights_digest()

    def describe(self) -> dict[str, Any]:
        """What results depend on, to distinguish one set of them from another."""
        model = hashlib.blake2b(repr(self.network.model).encode(), digest_size=16).hexdigest()
        seen = self.network.data
        prepared = [seen.level, seen.microns_per_pixel, seen.resize, list(seen.mean), list(seen.std)]
        return {"weights": self._digest, "model": model, "prepared": prepared, "classes": list(self.network.classes)}

    def _check_resize(self, slide: Slide, budget: int) -> None:
        """Check that an image that is resized, and so read whole, fits."""
        if self.network.data.resize is None:
            return
        level = slide.levels[min(self.network.data.level, len(slide.levels) - 1)]
        taken = 3 * 4 * slide.layout.channels * math.prod(level.size)
        if taken > budget:
            raise DataError(
                f"{slide.name} is read whole, because the run resizes its images: that takes {format_bytes(taken)} of "
                f"--memory {self.memory}; give more, or a coarser --level"
            )


def _stamp(path: Path) -> list[Any]:
    """A key that distinguishes a file from another one under the same name."""
    if path.is_dir():
        path = next((path / n for n in ("zarr.json", ".zarray", ".zgroup") if (path / n).is_file()), path)
    facts = path.stat()
    return [str(path.resolve()), facts.st_size, facts.st_mtime_ns]
