"""`outcore profile`: what a training step takes, block by block."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from outcore.cli.options import Arguments, Inputs, JobName, Json
from outcore.cost.profile import Profile, largest_batch
from outcore.cost.profile import profile as make_profile
from outcore.job import Job
from outcore.machine import Device, parse, remembered
from outcore.report.profile import ProfileView, batch_table

__all__ = ["profile"]


def profile(
    job: JobName,
    inputs: Inputs = None,
    arguments: Arguments = None,
    batch: Annotated[
        str, typer.Option("--batch", "-b", help="Batch size, or several: 1,2,4.", show_default="the job's own")
    ] = "",
    on: Annotated[
        str | None, typer.Option("--on", help="Another device: h200, a100, v100, or a machine's JSON file.")
    ] = None,
    measured: Annotated[
        bool, typer.Option("--measure/--estimate", help="Run every block alone on this machine, or run nothing.")
    ] = False,
    depth: Annotated[int, typer.Option("--depth", "-d", min=1, help="How deep to look.")] = 1,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Time limit of --measure.")] = 60.0,
    largest: Annotated[bool, typer.Option("--largest", help="Also find the largest batch that fits.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also save as JSON.")] = None,
    json: Json = False,
) -> None:
    """Show what a training step takes: time and memory, by block and by kind of layer.

    By estimate nothing is run, so any size and any device will do:

        outcore profile torchvision.models:resnet50 -i 1x3x100000x100000 --on h200

        outcore profile job.py --measure --batch 1,2,4
    """
    if on is not None and measured:
        raise typer.BadParameter("another device cannot be measured from here; leave out --measure", param_hint="--on")
    sizes = _sizes(batch)
    device = parse(on).devices[0] if on is not None else _here()
    found = Job.load(job, inputs=inputs or (), arguments=arguments or ())
    console = Console()
    profiles = [_one(found, device, size, measured, seconds, quiet=json) for size in sizes]
    best = largest_batch(found, device) if largest or len(sizes) > 1 else None
    document = {"profiles": [p.to_json() for p in profiles], "largest_batch": best}
    if output is not None:
        output.write_text(json_module.dumps(document) + "\n")
    if json:
        typer.echo(json_module.dumps(document))
    elif len(profiles) > 1:
        console.print(batch_table(profiles, best))
    else:
        console.print(ProfileView(profiles[0], depth=depth))
        if best is not None:
            console.print(f"largest batch that fits: {best}", highlight=False)


def _sizes(text: str) -> list[int | None]:
    try:
        sizes: list[int | None] = [int(part) for part in text.split(",") if part]
    except ValueError:
        raise typer.BadParameter(f"must be numbers like 1,2,4, not {text!r}", param_hint="--batch") from None
    if any(size is not None and size < 1 for size in sizes):
        raise typer.BadParameter("a batch has at least one sample", param_hint="--batch")
    return sizes or [None]


def _here() -> Device:
    """This machine's first device; probed on the first call."""
    console = Console(stderr=True)
    with console.status("looking at this machine"):
        return remembered().devices[0]


def _one(job: Job, device: Device, size: int | None, measured: bool, seconds: float, *, quiet: bool) -> Profile:
    if not measured:
        return make_profile(job, device, size=size)
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("measuring")

        def show(done: int, of: int, name: str) -> None:
            bar.update(task, completed=done, total=of, description=name or "measuring")

        return make_profile(job, device, size=size, measured=True, time_limit_s=seconds, progress=show)
