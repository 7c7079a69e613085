"""What is recorded and printed about a run: when it begins, and however it ends."""

from __future__ import annotations

import csv
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from outcore.machine.units import counted, format_bytes
from outcore.program import chart, save_trace
from outcore.report import page, run_bundle
from outcore.report.run import thin
from outcore.run.engine.setup import choose_device
from outcore.run.ranks.world import identify
from outcore.train.examples.supply import ExampleSupply
from outcore.train.launch import COMMAND
from outcore.train.loop import Loop, RunEnd
from outcore.train.run_folder.folder import RunFolder, replace
from outcore.train.start import RunForecast

__all__ = ["environment", "say_ending", "typed_command", "write_beginning", "write_ending", "write_report"]


def write_beginning(loop: Loop, expected: RunForecast) -> None:
    """Record what was decided and predicted, before the first step."""
    folder, curve = loop.folder, expected.curve
    folder.note(
        ended=None,
        error=None,
        environment=environment(),
        commands=[*(folder.read_facts().get("commands") or []), environment()["command"]],
        classes=_class_names(loop),
        class_counts=_class_counts(loop),
        forecast=expected.to_json(),
        watch=loop.config.watch,
        budget_bytes=loop.budget_bytes,
        memory={"predicted": [curve[i] for i in thin(range(len(curve)), curve)]} if curve else None,
    )
    if expected.graph is not None:
        replace(folder.path / "graph.json", json.dumps(expected.graph.to_json()))


def _class_names(loop: Loop) -> list[str]:
    """What the classes are called, where the data say it."""
    table = getattr(getattr(loop.feed, "examples", None), "table", None)
    return list(loop.config.data.classes or getattr(table, "classes", ()) or ())


def _class_counts(loop: Loop) -> dict[str, int]:
    """How many training examples there are of each class, where a table says it."""
    examples = getattr(loop.feed, "examples", None)
    table, chosen = getattr(examples, "table", None), getattr(examples, "rows", None)
    rows = [] if table is None else table.rows if chosen is None else [table.rows[i] for i in chosen]
    labels = [row.label for row in rows if isinstance(row.label, int) and row.mask is None]
    return {str(label): labels.count(label) for label in sorted(set(labels))}


def write_ending(loop: Loop, supply: ExampleSupply, ended: str, time_s: float) -> None:
    """Record how it ended, and list the bad slides."""
    folder, where = loop.folder, loop.position
    folder.note(
        ended=ended,
        time_s=time_s + float(folder.read_facts().get("time_s") or 0.0),
        position=where.to_json(),
        measured=loop.measured(),
        bad=[str(b) for b in supply.bad],
        damage=[str(tile) for tile in supply.damage],
        not_finite=where.not_finite,
        checkpoints_lost=loop.checkpoints_lost,
    )
    if supply.bad:
        with (folder.path / "bad.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["path", "reason"])
            writer.writerows([str(b.path), b.reason] for b in supply.bad)
    if loop.timeline is not None:
        replace(folder.path / "timeline.svg", chart(loop.timeline))
        save_trace(loop.timeline, folder.path / "trace.json")
    write_report(folder)


def write_report(folder: RunFolder) -> Path:
    """The page of a run, as one file."""
    replace(folder.report, page(run_bundle(folder.path)))
    return folder.report


def say_ending(loop: Loop, supply: ExampleSupply, ending: RunEnd, console: Console) -> None:
    """Print what happened, errors first."""
    where = loop.position
    for bad in supply.bad:
        console.print(f"skipped: {bad}", highlight=False, markup=False)
    if supply.damage:
        said = f"read as glass: {counted(len(supply.damage), 'damaged tile')}; the first: {supply.damage[0]}"
        console.print(said, highlight=False, markup=False)
    held, budget = loop.measured().get("peak_bytes"), loop.folder.read_facts().get("budget_bytes")
    if held and budget and held > budget:
        said = f"warning: a step held {format_bytes(held)}, more than the {format_bytes(budget)} allowed"
        console.print(said, style="red", highlight=False)
    if held and budget and choose_device(loop.config.train.device).type == "cpu":
        process = format_bytes(loop.measured()["process_bytes"])
        console.print(f"a step held {format_bytes(held)} of live tensors, the whole process {process}", highlight=False)
    if where.not_finite:
        steps = counted(where.not_finite, "step")
        console.print(f"{steps} had no finite loss and left the weights alone", highlight=False)
    if loop.checkpoints_lost:
        console.print(
            f"{counted(loop.checkpoints_lost, 'checkpoint')} could not be written", style="red", highlight=False
        )
    if loop.unsaved:
        said = "the last weights are not saved; make room, and run the same command again to go on"
        console.print(said, style="red", highlight=False)
    best = ""
    if where.best is not None and where.best_epoch is not None:
        best = f"; best {loop.config.watch} {where.best:.4g} in epoch {where.best_epoch + 1}"
    console.print(f"{ending.how} after {counted(where.step, 'step')}{best}", highlight=False)
    if loop.folder.report.exists():  # a full disk has none
        console.print(f"report: {loop.folder.report}", highlight=False, markup=False, soft_wrap=True)
    if ending.how == "interrupted":
        console.print("run the same command again to go on", highlight=False)


def environment() -> dict[str, Any]:
    """The versions and devices that the run was made with."""
    from outcore import __version__

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_name(i) for i in range(count)]
    identity = identify(os.environ)
    return {
        "outcore": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ranks": identity.size if identity is not None else 1,
        "command": typed_command(),
        "folder": str(Path.cwd()),
        "cuda": torch.version.cuda,
        "GPUs": ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or None,
    }


def typed_command() -> str:
    """The command as it was typed, also in the processes that it started."""
    return os.environ.get(COMMAND) or shlex.join(["outcore", *sys.argv[1:]])
