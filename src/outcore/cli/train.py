"""`outcore train`: a whole training run, from settings to report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outcore.cli.common.options import Arguments, Batch, Inputs, Json

__all__ = ["train"]


def train(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="A Python file with model() and batch(size), package.module:Class with --input, or a YAML file.",
            show_default=False,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.NAME=VALUE", help="Any setting: plan.memory=20GiB", show_default=False),
    ] = None,
    inputs: Inputs = None,
    arguments: Arguments = None,
    data: Annotated[str | None, typer.Option("--data", help="Table of slides, or folder of images by class.")] = None,
    validation: Annotated[str | None, typer.Option("--validation", help="Another one, or a share like 0.2.")] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", "-m", help="Budget of device memory: 20GiB, or 50% of a plain step's.")
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", min=1, help="Processes to train with.")] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", "-e", min=1, help="Times through the data.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps of an epoch.")] = None,
    batch: Batch = None,
    accumulate: Annotated[int | None, typer.Option("--accumulate", min=1, help="Batches of a step.")] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="fp32, bf16 or fp16.")] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the weights and the order of the data.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda.", show_default="a GPU if any")] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", help="auto, never, or a checkpoint.", show_default="auto")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Folder of the run.", show_default="runs/NAME")] = None,
    json: Json = False,
) -> None:
    """Train a network: within a budget, on one device or many, to be stopped and continued at any time.

        outcore train job.py --data slides.csv --memory 20GiB --epochs 10

        outcore train run.yaml plan.memory=20GiB schedule.name=CosineAnnealingLR

    Run the same command again after an interruption: it goes on where it was.
    """
    from rich.console import Console

    from outcore.train.application import train as run
    from outcore.train.settings.config import Config

    given: dict[str, Any] = {
        "input": inputs,
        "arguments": arguments,
        "data.train": data,
        "data.validation": validation,
        "plan.memory": memory,
        "plan.ranks": ranks,
        "train.epochs": epochs,
        "train.steps": steps,
        "train.batch": batch,
        "train.accumulate": accumulate,
        "train.precision": precision,
        "optimizer.lr": lr,
        "train.seed": seed,
        "train.device": device,
        "resume": resume,
        "out": out,
    }
    words = [f"{name}={_written(value)}" for name, value in given.items() if value is not None]
    words += settings or []
    if job.endswith((".yaml", ".yml")):
        config = Config.load(Path(job), words)
    else:
        name = Path(job).stem if job.endswith(".py") else job.rpartition(":")[2]
        config = Config.read({"job": job, "out": f"runs/{name}"}, words)
    code = run(config, Console(quiet=json))
    if json:
        typer.echo((Path(config.out) / "run.json").read_text(encoding="utf-8"))
    raise typer.Exit(code)


def _written(value: Any) -> str:
    return f"[{', '.join(repr(v) for v in value)}]" if isinstance(value, list) else str(value)
