"""The training application on a slide that does not fit, and what it adds to a step.

    python benchmarks/train-application/run.py --out results.json [--part slide] [--part overhead] [--small]

slide     examples/pathology: some steps on one slide, within a budget that the allocator is not let beyond
overhead  steps of `outcore train` beside those of a loop written by hand, in turns: same network, examples, updates

The slide, the example's warm-up, which gives the frozen norm its statistics, and the plan lie in a folder (`--folder`);
what is not there is made. `--only-prepare` makes it and leaves: a device that is lent for seconds need not wait for it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from outcore.data import write_slides
from outcore.job import Job
from outcore.machine.units import parse_bytes
from outcore.program.plan.document import Plan
from outcore.stream.execute.execution import Execution
from outcore.train import application
from outcore.train.examples.supply import find_supply
from outcore.train.progress import ProgressDisplay, make_show
from outcore.train.runners.tiling import plan_stream
from outcore.train.settings.config import Config
from outcore.train.start import device_here, forecast

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


@dataclass(frozen=True)
class Prepared:
    """What the run over a slide starts from."""

    config: Config
    side: int
    depth: int
    times_s: dict[str, float]


def prepare(folder: Path, arguments: argparse.Namespace) -> Prepared:
    """The slide, the weights and the plan, made where they are not there."""
    side, depth, memory, tile = (256, 11, "40MiB", 64) if arguments.small else (32768, 110, "24GiB", 512)
    os.environ["SIDE"] = str(side)
    table, weights, plan = (
        folder / "slides" / "train.csv",
        folder / "warm-up" / "checkpoints" / "last",
        folder / "plan.json",
    )
    times = {}
    if not table.exists():
        began = time.perf_counter()
        write_slides(table.parent, 1, size=(side, side), share=arguments.share, tile=tile, name=table.name)
        times["slide_s"] = time.perf_counter() - began
    if not weights.exists():
        began = time.perf_counter()
        _warm_up(folder / "warm-up", table, depth, side, arguments.device)
        times["warm_up_s"] = time.perf_counter() - began
    overrides = [
        f"data.train={table}",
        "data.validation=",
        "watch=loss",
        f"plan.memory={memory}",
        f"train.epochs={arguments.steps}",
        f"train.device={arguments.device}",
        f"train.precision={_precision(arguments)}",
        f"arguments=[norm=frozen, depth={depth}, weights={weights}]",
        f"out={folder / 'run'}",
    ]
    if not plan.exists():
        began = time.perf_counter()
        _plan(Config.load(EXAMPLE / "run.yaml", overrides)).save(plan)
        times["plan_s"] = time.perf_counter() - began
    config = Config.load(EXAMPLE / "run.yaml", [*overrides, f"plan.file={plan}"])
    return Prepared(config, side, depth, times)


def _plan(config: Config) -> Plan:
    """The tiles, as the application plans them before its first step."""
    job = Job.load(config.job, arguments=config.arguments)
    inputs = find_supply(config, job).first(config, job).inputs
    model = job.build().to(device_here(config.train.device)[0]).train()
    assert config.plan.memory is not None
    return plan_stream(model, job, config, forecast(job, inputs, config), inputs, parse_bytes(config.plan.memory))


def slide(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Some steps on one slide; what the run said of itself."""
    prepared = prepare(folder, arguments)
    shutil.rmtree(folder / "run", ignore_errors=True)
    if arguments.device == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        assert prepared.config.plan.memory is not None
        torch.cuda.set_per_process_memory_fraction(parse_bytes(prepared.config.plan.memory) / whole)
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    runners: list[Any] = []
    passes: list[dict[str, float]] = []
    with (
        mock.patch.object(application, "build_runner", _kept(application.build_runner, runners)),
        mock.patch.object(Execution, "forward", _timed(Execution.forward, passes, "forward_s")),
        mock.patch.object(Execution, "backward", _timed(Execution.backward, passes, "backward_s")),
    ):
        code = application.train(prepared.config, Console(width=120))
    wall_s = time.perf_counter() - began
    facts = json.loads((folder / "run" / "run.json").read_text())
    with (folder / "run" / "steps.csv").open() as file:
        steps = [float(row["time_s"]) for row in csv.DictReader(file)]
    measured, forecasted = facts["measured"], facts["forecast"]
    counts = runners[0].model.counts
    found = {
        "part": "slide",
        "example": f"ResNet110V2 depth {prepared.depth}, frozen batch norm",
        "side": prepared.side,
        "tissue": arguments.share,
        "precision": _precision(arguments),
        "code": code,
        "budget_bytes": facts["budget_bytes"],
        "plain": {"peak_bytes": forecasted["peak_bytes"], "step_s": forecasted["step_s"]},
        "planned": {"peak_bytes": forecasted["planned_peak_bytes"], "step_s": forecasted["planned_step_s"]},
        "measured": {"peak_bytes": measured["peak_bytes"], "steps_s": steps},
        "tiles_of_last_step": {"forward": counts.forward, "backward": counts.backward, "reused": counts.reused},
        "waited_for_pixels_s": counts.waited_s,
        "passes": passes,
        "bookkeeping_s": measured["bookkeeping_s"],
        "decisions": forecasted["decisions"],
        "prepared": prepared.times_s,
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


def _timed(run: Any, found: list[dict[str, float]], name: str) -> Any:
    """A pass over the tiles, and how long it took until the device was done with it."""

    def timed(execution: Execution, *given: Any) -> Any:
        _wait(execution.device)
        began = time.perf_counter()
        made = run(execution, *given)
        _wait(execution.device)
        found.append({name: time.perf_counter() - began, "waited_s": execution.counts.waited_s})
        return made

    return timed


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _warm_up(out: Path, table: Path, depth: int, side: int, device: str) -> None:
    """Statistics for the norm, from crops."""
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


class Timed:
    """Shows what another does, and notes when each step ended."""

    def __init__(self, inner: ProgressDisplay) -> None:
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
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--part", action="append", choices=["slide", "overhead"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--share", type=float, default=0.3, help="of the slide that is tissue")
    parser.add_argument("--steps", type=int, default=3, help="on the slide; the first chooses algorithms")
    parser.add_argument("--folder", type=Path, help="of slide, warm-up and plan; kept")
    parser.add_argument("--only-prepare", action="store_true")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()
    found: dict[str, Any] = {"torch": torch.__version__, "device": name, "parts": []}
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or Path(made)
        if arguments.only_prepare:
            print(prepare(folder, arguments))
            return
        for part in arguments.part or ["slide", "overhead"]:
            try:
                row = {"slide": slide, "overhead": overhead}[part](folder, arguments)
            except Exception as error:  # a part that fails stays in the table
                row = {"part": part, "error": f"{type(error).__name__}: {error}"}
            found["parts"].append(row)
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps(row, indent=1), flush=True)


if __name__ == "__main__":
    main()
