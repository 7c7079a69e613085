"""One slide through a network: a map that is written tile by tile, or the scores of its classes.

    slide ─▶ tiles of logits ─┬▶ class of each pixel, or the numbers ─▶ mask.tif
                              ├▶ probability of one class            ─▶ mask.heat.tif
                              └▶ pixels of each class                ─▶ overlay, results

Scores are what the network gives (logits); probabilities are their softmax, or for a single output the sigmoid. They
are not calibrated: whether 0.9 is right nine times out of ten is for the user's own validation data to say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from outcore.data import Slide
from outcore.errors import DataError, JobError, suggest
from outcore.infer.fit import Fitted
from outcore.infer.map_file import MapFile, Progress, check_kind, write_map, write_region
from outcore.infer.network import InferNetwork
from outcore.infer.overlay import can_draw, write_overlay
from outcore.infer.palette import class_colours, heat_colours
from outcore.infer.partial import Partial
from outcore.ops.region import Region

__all__ = ["MapOutputs", "Values", "class_scores", "infer_map", "probabilities"]

Values = Literal["classes", "scores", "probabilities"]
Report = Callable[[int, int], None]
"""Called with the number of tiles that are done, and of all."""


@dataclass(frozen=True)
class MapOutputs:
    """What is written of a map."""

    map: Path
    values: Values = "classes"
    heat: str | None = None
    """The class whose probability is written as a map of its own."""
    overlay: bool = True

    @property
    def heat_path(self) -> Path:
        """Beside the map."""
        return self.map.with_name(f"{self.map.stem}.heat.tif")

    @property
    def overlay_path(self) -> Path:
        """Beside the map."""
        return self.map.with_name(f"{self.map.stem}.overlay.png")

    def paths(self) -> list[Path]:
        """Everything that may be written."""
        return [self.map, *([self.heat_path] if self.heat else []), *([self.overlay_path] if self.overlay else [])]


def probabilities(logits: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Softmax over classes; of a single output the sigmoid.

    >>> probabilities(torch.tensor([0.0])).item()
    0.5
    """
    return logits.sigmoid() if logits.shape[dim] == 1 else logits.softmax(dim)


def class_scores(network: InferNetwork, made: Any) -> dict[str, Any]:
    """The result row of a network that gives scores of classes."""
    if not isinstance(made, torch.Tensor):
        raise JobError(f"the model returned {type(made).__name__}; infer writes one tensor, a map or class scores")
    scores = made.float().flatten().cpu()
    if not scores.isfinite().all():
        raise DataError("the network gave scores that are not finite; train it longer, or with a lower learning rate")
    names = network.names(len(scores))
    # A single number is a value, or the logit of one class; which, only the user knows.
    best = int(scores.argmax()) if len(scores) > 1 else int(scores[0] > 0)
    row: dict[str, Any] = {"class": best, "names": list(names)}
    if len(scores) > 1:
        row["name"] = names[best]
    elif len(network.classes) == 2:
        row["name"] = network.classes[best]
    row["scores"] = [round(n, 6) for n in scores.tolist()]
    row["probabilities"] = [round(n, 6) for n in probabilities(scores).tolist()]
    return row


def infer_map(
    network: InferNetwork,
    fitted: Fitted,
    slide: Slide,
    image: Any,
    outputs: MapOutputs,
    *,
    about: dict[str, Any],
    report: Report = lambda done, total: None,
) -> dict[str, Any]:
    """Write the map of a slide, going on where an earlier run of the same stopped.

    Args:
        network: with its weights.
        fitted: how it is run.
        slide: what is looked at.
        image: the same, as the network sees it.
        outputs: what is written.
        about: whatever else the result depends on.
        report: called after every tile.
    """
    prepared = fitted.streamed.prepare(image)
    _, channels, *pixels = prepared.network.shapes[prepared.graph.outputs[0]]
    maps = _Maps(network, outputs, channels, tuple(pixels))
    check_kind(outputs.map, maps.shape)
    said = {
        **about,
        "plan": fitted.plan.document(),
        "graph": fitted.fingerprint,
        "outputs": [str(outputs.map.name), outputs.values, maps.heat],
        "data": asdict(replace(network.data, train=None, validation=None)),
        "shape": list(maps.shape),
    }
    total = len(prepared.grids[-1])
    with Partial(outputs.map) as partial:
        again = partial.begin(said)
        opened = [file.open(again=again) for file in maps.files(partial.folder)]
        progress = Progress(partial.folder / "done.jsonl", opened)
        if again:
            progress.read()
        before = len(progress.filled)
        with _synced(progress):
            for region, part in fitted.streamed.tiles(image, skip=progress.filled):
                progress.note(region, maps.fill(opened, region, part[0]))
                report(len(progress.filled), total)
        shares = [n / max(1, sum(progress.counts)) for n in progress.counts]
        written = _publish(partial, maps, opened, slide, image, shares)
    return {
        "output": str(outputs.map),
        "shape": list(maps.shape),
        "classes": outputs.values == "classes" and channels > 1,
        "names": list(maps.names),
        "shares": [round(share, 6) for share in shares],
        "tiles": total,
        "tiles_from_before": before,
        **written,
    }


@contextlib.contextmanager
def _synced(progress: Progress) -> Iterator[None]:
    """A context after which what was written is listed, however it ends."""
    try:
        yield
    finally:
        progress.sync()


class _Maps:
    """Which maps are filled, and how a tile of logits becomes a part of each."""

    def __init__(self, network: InferNetwork, outputs: MapOutputs, channels: int, pixels: tuple[int, ...]) -> None:
        self.outputs, self.channels, self.pixels = outputs, channels, pixels
        self.names = network.names(channels)
        self.classes = channels > 1 and outputs.values == "classes"
        flat = self.classes or (channels == 1 and outputs.map.suffix.lower() in (".tif", ".tiff"))
        self.shape = pixels if flat else (channels, *pixels)
        small = np.uint8 if channels <= 256 else np.int32
        self.dtype = np.dtype(small if self.classes else np.float32)
        self.heat = None if outputs.heat is None else self._number(outputs.heat)

    def _number(self, heat: str) -> int:
        if heat in self.names:
            return self.names.index(heat)
        if heat.isdecimal() and int(heat) < self.channels:
            return int(heat)
        raise JobError(f"--heat {heat}: the network has no such class; {suggest(heat, self.names)}")

    def files(self, folder: Path) -> list[MapFile]:
        """The files that are filled."""
        made = [MapFile(folder / "map.npy", self.shape, self.dtype)]
        if self.heat is not None:
            made.append(MapFile(folder / "heat.npy", self.pixels, np.dtype(np.uint8)))
        return made

    def fill(self, opened: list[Any], region: Region, logits: torch.Tensor) -> list[int]:
        """Put one tile into the maps; the pixels of each class."""
        logits, place, counts = logits.float(), region[2:], []
        if self.classes:
            best = logits.argmax(0)
            counts = torch.bincount(best.flatten(), minlength=self.channels).tolist()
            write_region(opened[0], place, best.to(torch.uint8 if self.dtype == np.uint8 else torch.int32))
        else:
            numbers = probabilities(logits) if self.outputs.values == "probabilities" else logits
            whole = len(self.shape) > len(self.pixels)
            write_region(opened[0], ((0, self.channels), *place) if whole else place, numbers if whole else numbers[0])
        if self.heat is not None:
            likely = logits[0].sigmoid() if self.channels == 1 else (logits[self.heat] - logits.logsumexp(0)).exp()
            write_region(opened[1], place, (likely * 255).round().to(torch.uint8))
        return counts


def _publish(
    partial: Partial, maps: _Maps, opened: list[Any], slide: Slide, image: Any, shares: list[float]
) -> dict[str, Any]:
    """Make the files of the filled maps and give them their names, the map last."""
    outputs, folder, written = maps.outputs, partial.folder, {}
    microns = _microns(slide, image, maps.pixels)
    if outputs.overlay and maps.classes and len(maps.pixels) == 2 and can_draw(slide):
        made = folder / "overlay.png"
        write_overlay(made, slide, opened[0], maps.names, shares)
        partial.publish(made, outputs.overlay_path)
        written["overlay"] = str(outputs.overlay_path)
    if maps.heat is not None:
        made = folder / "heat.tif"
        write_map(opened[1], made, scratch=folder, colours=heat_colours(), mean=True, microns_per_pixel=microns)
        partial.publish(made, outputs.heat_path)
        written["heat"] = str(outputs.heat_path)
    made = folder / f"made{outputs.map.suffix.lower()}"
    colours = class_colours(maps.channels) if maps.classes and maps.channels <= 256 else None
    write_map(opened[0], made, scratch=folder, colours=colours, mean=not maps.classes, microns_per_pixel=microns)
    partial.publish(made, outputs.map)
    return written


def _microns(slide: Slide, image: Any, pixels: tuple[int, ...]) -> float | None:
    """Microns per pixel of the map, where the slide says its own."""
    finest = slide.microns_per_pixel
    return None if finest is None else finest * slide.levels[0].size[-1] / pixels[-1]
