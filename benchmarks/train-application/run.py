"""The training application on a slide that does not fit, and what it adds to a step.

    python benchmarks/train-application/run.py --out results.json [--part slide] [--part overhead] [--small]

slide     examples/pathology: one epoch over one slide, within a budget that the allocator is not let beyond
overhead  steps of `outcore train` beside those of a loop written by hand, in turns: same network, examples, updates

A slide and a plan made before (`--slides`, `--plan`) save time on a device that is lent for seconds.

Weights for the frozen norm come from the example's warm-up (`--weights`), which is run first where none are given.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from outcore.data import write_slides
from outcore.machine.units import parse_bytes
from outcore.train import application
from outcore.train.config import Config
from outcore.train.progress import Show, make_show

EXAMPLE = Path(__file__).parents[2] / "examples" / "pathology"
OVERHEAD_JOB = """
import torch
from outcore.models import ResNet110V2

torch.manual_seed(0)
EXAMPLES = [(torch.rand(3, {side}, {side}), i % 2) for i in range({count})]


def model():
    return ResNet110V2(classes=2, depth={depth})


def batch(size):
    return torch.rand(size, 3, {side}, {side}), torch.randint(2, (size,))


def dataset(split):
    return EXAMPLES if split == "train" else None


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
"""


def slide(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run over one slide; what it said of itself."""
    side, depth, memory = (256, 11, "40MiB") if arguments.small else (32768, 110, "24GiB")
    began = time.perf_counter()
    tile = 64 if arguments.small else 512
    table = arguments.slides or write_slides(
        folder / "slides", 1, size=(side, side), share=arguments.share, tile=tile, name="train.csv"
    )
    written_s = time.perf_counter() - began
    os.environ["SIDE"] = str(side)
    weights = arguments.weights or _warm_up(folder, table, depth, side, arguments.device)
    overrides = [
        f"data.train={table}",
        "data.validation=",
        "watch=loss",
        f"plan.memory={memory}",
        "train.epochs=1",
        f"train.device={arguments.device}",
        f"train.precision={'fp32' if arguments.device == 'cpu' else 'bf16'}",
        f"arguments=[norm=frozen, depth={depth}, weights={weights}]",
        f"out={folder / 'slide'}",
    ]
    if arguments.plan:
        overrides.append(f"plan.file={arguments.plan}")
    if arguments.device == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(parse_bytes(memory) / whole)
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    runners = []
    with mock.patch.object(application, "build_runner", _kept(application.build_runner, runners)):
        code = application.train(Config.load(EXAMPLE / "run.yaml", overrides), Console(width=120))
    wall_s = time.perf_counter() - began
    facts = json.loads((folder / "slide" / "run.json").read_text())
    measured, forecast = facts["measured"], facts["forecast"]
    counts = runners[0].model.counts
    found = {
        "part": "slide",
        "example": f"ResNet110V2 depth {depth}, frozen batch norm",
        "side": side,
        "tissue": arguments.share,
        "precision": "fp32" if arguments.device == "cpu" else "bf16",
        "code": code,
        "budget_bytes": facts["budget_bytes"],
        "plain": {"peak_bytes": forecast["peak_bytes"], "step_s": forecast["step_s"]},
        "planned": {"peak_bytes": forecast["planned_peak_bytes"], "step_s": forecast["planned_step_s"]},
        "measured": {"peak_bytes": measured["peak_bytes"], "step_s": measured["step_s"]},
        "tiles": {"forward": counts.forward, "backward": counts.backward, "reused": counts.reused},
        "waited_for_pixels_s": counts.waited_s,
        "bookkeeping_s": measured["bookkeeping_s"],
        "decisions": forecast["decisions"],
        "slide_written_s": written_s,
        "wall_s": wall_s,
    }
    if arguments.device == "cuda":
        found["measured"]["reserved_bytes"] = torch.cuda.max_memory_reserved()
        torch.cuda.set_per_process_memory_fraction(1.0)
    return found


def _kept(build: Any, runners: list[Any]) -> Any:
    def built(*given: Any) -> Any:
        made = build(*given)
        runners.append(made[0])
        return made

    return built


def _warm_up(folder: Path, table: Path, depth: int, side: int, device: str) -> Path:
    """Statistics for the norm, from crops."""
    out = folder / "warm-up"
    overrides = [
        f"data.train={table}",
        f"data.crop={min(256, side // 4)}",
        "train.batch=1",
        "train.epochs=8",
        f"train.device={device}",
        f"arguments=[norm=batch, depth={depth}]",
        f"out={out}",
    ]
    if application.train(Config.load(EXAMPLE / "warm_up.yaml", overrides), Console(quiet=True)):
        raise RuntimeError("the warm-up was interrupted")
    return out / "checkpoints" / "last"


class Timed:
    """Shows what another does, and notes when each step ended."""

    def __init__(self, inner: Show) -> None:
        self.inner, self.ends = inner, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, row: Mapping[str, Any]) -> None:
        """Note the time after the bar has moved."""
        self.inner.step(row)
        self.ends.append(time.perf_counter())


def overhead(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Steps of the application beside those of a loop by hand, in turns."""
    side, count, batch, depth, rounds = (32, 24, 4, 11, 2) if arguments.small else (224, 160, 8, 110, 1)
    job = folder / "overhead.py"
    job.write_text(OVERHEAD_JOB.format(side=side, count=count, depth=depth))
    ours, plain, bookkeeping = [], [], []
    for number in range(rounds):
        plain += _by_hand(job, batch, arguments.device)
        settings = {
            "job": str(job),
            "train": {"batch": batch, "device": arguments.device, "precision": _precision(arguments)},
            "log": {"tensorboard": False},
            "out": str(folder / f"overhead-{number}"),
        }
        shows: list[Timed] = []

        def timed(*given: Any, shows: list[Timed] = shows, **options: Any) -> Timed:
            shows.append(Timed(make_show(*given, **options)))
            return shows[-1]

        with (
            mock.patch.object(application, "make_show", timed),
            Path(os.devnull).open("w") as nothing,
        ):
            application.train(Config.read(settings), Console(file=nothing, force_terminal=True, width=100))
        ours += _periods(shows[0].ends)
        facts = json.loads((folder / f"overhead-{number}" / "run.json").read_text())
        bookkeeping.append(facts["measured"]["bookkeeping_s"])
    mine, theirs = statistics.median(ours), statistics.median(plain)
    return {
        "part": "overhead",
        "network": f"ResNet110V2 depth {depth}, {batch}x3x{side}x{side}",
        "precision": _precision(arguments),
        "by_hand_s": theirs,
        "application_s": mine,
        "ratio": mine / theirs,
        "bookkeeping_s": statistics.median(bookkeeping),
        "bookkeeping_share": statistics.median(bookkeeping) / mine,
        "steps": len(ours),
    }


def _precision(arguments: argparse.Namespace) -> str:
    return "fp32" if arguments.device == "cpu" else "bf16"


def _periods(ends: list[float]) -> list[float]:
    """From the end of a step to the end of the next, once it is warm."""
    found = [b - a for a, b in itertools.pairwise(ends)]
    return found[len(found) // 4 :]


def _by_hand(job: Path, batch: int, device: str) -> list[float]:
    """The loop that a user would write; the loss is looked at in every step, as the application does."""
    names: dict[str, Any] = {}
    exec(job.read_text(), names)
    torch.manual_seed(0)
    net = names["model"]().to(device).train()
    optimizer = names["optimizer"](net.parameters())
    examples = names["dataset"]("train")
    ends = []
    order = torch.randperm(len(examples)).tolist()
    for start in range(0, len(order), batch):
        chosen = [examples[i] for i in order[start : start + batch]]
        images, labels = torch.stack([x for x, _ in chosen]).to(device), torch.tensor([y for _, y in chosen]).to(device)
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss = torch.nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        loss.item()
        ends.append(time.perf_counter())
    return _periods(ends)


def main() -> None:
    """Run the parts and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", action="append", choices=["slide", "overhead"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--share", type=float, default=0.3, help="of the slide that is tissue")
    parser.add_argument("--slides", type=Path, help="the table of a slide written before, with that share")
    parser.add_argument("--plan", type=Path, help="tiles planned before: the plan.json of such a run")
    parser.add_argument("--weights", type=Path, help="a checkpoint of the warm-up")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()
    found: dict[str, Any] = {"torch": torch.__version__, "device": name, "parts": []}
    with tempfile.TemporaryDirectory() as folder:
        for part in arguments.part or ["slide", "overhead"]:
            try:
                row = {"slide": slide, "overhead": overhead}[part](Path(folder), arguments)
            except Exception as error:  # a part that fails stays in the table
                row = {"part": part, "error": f"{type(error).__name__}: {error}"}
            found["parts"].append(row)
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps(row, indent=1), flush=True)


if __name__ == "__main__":
    main()
