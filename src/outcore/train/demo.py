"""One minute, no GPU, no download: a slide too large for the budget, looked at, planned, trained on, reported.

Everything it shows is computed while it runs: the slide is written, the network recorded, the plain step predicted, the
training made within the budget and measured, the gradients compared with plain PyTorch's on a crop.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch.nn import functional as F

from outcore.data import Scene, Slide, open_slide, read_table, write_slides
from outcore.errors import TrainError
from outcore.machine.units import format_bytes, format_time, parse_bytes
from outcore.models import SlideNet
from outcore.train.application import train
from outcore.train.run_folder.folder import RunFolder
from outcore.train.settings.config import Config
from outcore.train.thumbnail import thumbnail

__all__ = ["Demo", "compare_gradients"]

JOB = '''\
"""The demo's job: a classifier of whole slides that is local up to its pool."""

import torch
from outcore.models import SlideNet


def model():
    return SlideNet()


def batch(size):
    return torch.rand(size, 3, {side}, {side}), torch.randint(2, (size,))


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
'''


@dataclass(frozen=True)
class Demo:
    """What the demo does, in which folder and how large."""

    folder: Path
    console: Console
    side: int = 4096
    slides: int = 4
    epochs: int = 2

    @property
    def budget(self) -> str:
        """About a fifth of what a plain step on such a slide needs."""
        return f"{max(4, round(128 * (self.side / 4096) ** 2))}MiB"

    def run(self) -> dict[str, Any]:
        """All of it, anew; returns the figures."""
        began = time.monotonic()
        job = self._clear()
        job.write_text(JOB.format(side=self.side), encoding="utf-8")
        table = self._slides()
        self._network()
        folder = self._train(job, table)
        agreement = self._gradients()
        facts = json.loads(folder.facts.read_text(encoding="utf-8"))
        self._summary(facts, folder, time.monotonic() - began)
        return {"facts": facts, "agreement": agreement}

    def _clear(self) -> Path:
        """Remove what an earlier demo made here, and nothing else; returns where the job goes."""
        job = self.folder / "job.py"
        if self.folder.exists() and any(self.folder.iterdir()):
            if not job.is_file() or job.read_text(encoding="utf-8").partition("\n")[0] != JOB.partition("\n")[0]:
                raise TrainError(f"{self.folder} is not a folder of the demo; say another with --out")
            for made in ("slides", "run"):
                shutil.rmtree(self.folder / made, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        return job

    def _slides(self) -> Path:
        self._title("1", f"{self.slides} slides of {self.side:,} x {self.side:,} pixels")
        with self.console.status("writing slides"):
            # A pyramidal TIFF needs tifffile; without it a mapped array does.
            form: Literal["tif", "npy"] = "tif" if find_spec("tifffile") else "npy"
            size = (self.side, self.side)
            table = write_slides(self.folder / "slides", self.slides, size=size, share=0.3, form=form)
        rows = read_table(table)
        slide = rows[0].image
        self.console.print(Padding(self._described(slide, rows.rows[0].label), (0, 0, 0, 2)))
        return table

    def _described(self, slide: Slide, label: Any) -> Table | Text:
        path = Path(slide.name)
        raw = slide.shape[0] * slide.shape[1] * slide.shape[2]
        kind = "pyramidal TIFF" if path.suffix == ".tif" else "mapped array"
        gap = Scene((self.side, self.side), share=0.3).gap
        words = Text.assemble(
            (path.name, "bold"),
            f", a {kind}: {format_bytes(path.stat().st_size)} for {format_bytes(raw)} of pixels.\n\n",
            f"Its label is {label}: the two pieces of tissue are of ",
            ("different kinds" if label else "the same kind", "bold"),
            f". A patch narrower than {gap:,} pixels sees one piece at most, so no patch knows the label. ",
            ("The whole slide must be trained on at once.", "bold"),
        )
        if self.console.color_system not in ("truecolor", "256"):
            return words
        beside = Table.grid(padding=(0, 3))
        beside.add_column(no_wrap=True)
        beside.add_column(max_width=60, vertical="middle")
        beside.add_row(thumbnail(slide, columns=28), words)
        return beside

    def _network(self) -> None:
        from outcore.graph import capture
        from outcore.report import tree

        self._title("2", "The network, recorded at this size without memory for it")
        with torch.device("meta"):
            graph = capture(SlideNet(), [(1, 3, self.side, self.side)])
        self.console.print(Padding(tree(graph, depth=1), (0, 0, 0, 2)), highlight=False)

    def _train(self, job: Path, table: Path) -> RunFolder:
        self._title("3", f"Training within {format_bytes(parse_bytes(self.budget))}")
        folder = RunFolder(self.folder / "run")
        settings = {
            "job": str(job),
            "data": {"train": str(table), "mean": [0.85] * 3, "std": [0.15] * 3},
            "plan": {"memory": self.budget},
            "train": {"epochs": self.epochs, "device": "cpu"},
            "out": str(folder.path),
        }
        code = train(Config.read(settings), self.console)
        if code:
            raise TrainError("the demo was interrupted; run again, it begins anew")
        return folder

    def _gradients(self) -> float:
        self._title("4", "The same gradients as plain PyTorch")
        crop = min(self.side, 512)
        agreement = compare_gradients(crop, max(64, crop // 3))
        said = f"On a crop of {crop} px, in tiles, in float64: off by at most {agreement:.1e} of the largest gradient."
        self.console.print(Padding(said, (0, 0, 0, 2)), highlight=False)
        return agreement

    def _summary(self, facts: dict[str, Any], folder: RunFolder, time_s: float) -> None:
        self._title("5", "Predicted beside measured")
        forecast, measured = facts["forecast"], facts["measured"]
        budget = parse_bytes(self.budget)
        table = Table(box=None, padding=(0, 3, 0, 2))
        for name in ("", "plain, predicted", "planned", "measured"):
            table.add_column(name, justify="right" if name else "left")
        table.add_row(
            "peak memory",
            f"{format_bytes(forecast['peak_bytes'])} ({forecast['peak_bytes'] / budget:.1f} x the budget)",
            _bytes(forecast["planned_peak_bytes"]),
            format_bytes(measured["peak_bytes"]),
        )
        table.add_row(
            "step time",
            format_time(forecast["step_s"]),
            _time(forecast["planned_step_s"]),
            format_time(measured["step_s"]),
        )
        self.console.print(table, highlight=False)
        self.console.print(f"\n  {time_s:.0f} s in all. The report: ", end="", highlight=False)
        self.console.print(str(folder.report), style="bold", highlight=False, soft_wrap=True)

    def _title(self, number: str, text: str) -> None:
        self.console.print(f"\n[bold cyan]{number}[/]  [bold]{text}[/]\n", highlight=False)


def compare_gradients(side: int, tile: int) -> float:
    """The largest difference between streamed and plain gradients, over the largest gradient, in float64."""
    from outcore.stream import stream

    torch.manual_seed(0)
    net = SlideNet().double()
    scene = Scene((side, side), share=0.4, tile=64)
    slide = open_slide(scene.region([(0, side), (0, side)]).transpose(2, 0, 1))
    image, target = (
        slide.read([(0, 3), (0, side), (0, side)])[None].double() / 255,
        torch.tensor([scene.label], device="cpu"),
    )
    found = []
    for model in (net, stream(net, tile=tile)):
        net.zero_grad(set_to_none=True)
        F.cross_entropy(model(image), target).backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    largest = max(float(g.abs().max()) for g in found[0])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)) / largest


def _bytes(value: int | None) -> str:
    return "–" if value is None else format_bytes(value)


def _time(value: float | None) -> str:
    return "–" if value is None else format_time(value)
