"""`outcore profile`: what a training step takes, block by block."""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from outcore.cli.options import Arguments, Inputs, JobName, Json
from outcore.cost.profile import Profile, largest_batch, scale
from outcore.cost.profile import profile as make_profile
from outcore.job import Job
from outcore.machine import Device, known, parse
from outcore.report.profile import ProfileView, scaling_table
from outcore.report.profile_svg import profile_svg

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
    image: Annotated[
        str, typer.Option("--image", help="Longest sides of the images to predict: 256,512,1024.", show_default=False)
    ] = "",
    svg: Annotated[Path | None, typer.Option("--svg", help="Also draw where the time goes.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also save as JSON.")] = None,
    json: Json = False,
) -> None:
    """Show what a training step takes: time and memory, by block and by kind of layer.

    By estimate nothing is run, so any size and any device will do:

        outcore profile torchvision.models:resnet50 -i 1x3x100000x100000 --on h200

        outcore profile job.py --measure --batch 1,2,4

        outcore profile job.py --on a100 --image 512,1024,2048 --svg profile.svg
    """
    if on is not None and measured:
        raise typer.BadParameter("another device cannot be measured from here; leave out --measure", param_hint="--on")
    sizes, sides = _sizes(batch, "--batch"), _sizes(image, "--image")
    if len(sizes) > 1 and sides:
        raise typer.BadParameter("several batch sizes or several image sizes, not both", param_hint="--image")
    device = parse(on).devices[0] if on is not None else _here()
    found = Job.load(job, inputs=inputs or (), arguments=arguments or ())
    if len(sizes) > 1 or sides:
        _show_sizes(found, device, sizes, sides, measured=measured, seconds=seconds, output=output, json=json, svg=svg)
        return
    shown = _one(found, device, sizes[0] if sizes else None, measured, seconds, quiet=json)
    best = largest_batch(found, device) if largest else None
    if svg is not None:
        svg.write_text(profile_svg(shown))
    _write({"profiles": [shown.to_json()], "largest_batch": best}, output, json)
    if not json:
        console = Console()
        console.print(ProfileView(shown, depth=depth))
        if best is not None:
            console.print(f"largest batch that fits: {best}", highlight=False)


def _show_sizes(
    job: Job,
    device: Device,
    sizes: list[int],
    sides: list[int],
    *,
    measured: bool,
    seconds: float,
    output: Path | None,
    json: bool,
    svg: Path | None,
) -> None:
    """A table over batch or image sizes, predicted by estimate and with --measure from measured blocks beside it."""
    if sides:
        found = scale(job, device, along="image", sizes=sides, size=sizes[0] if sizes else None)
    else:
        found = scale(job, device, sizes=sizes)
    profiles = []
    if measured:
        points = {p.size: p for p in found.points}
        for size in sides or sizes:
            if size in points:
                batch, side = (sizes[0] if sizes else None, size) if sides else (size, None)
                profiles.append(_one(job, device, batch, True, seconds, quiet=json, image=side))
                points[size] = replace(points[size], measured_s=profiles[-1].step.step_s)
        found = replace(found, points=tuple(points.values()))
    else:
        profiles = [_one(job, device, size, False, seconds, quiet=True) for size in sizes]
    if svg is not None and profiles:
        svg.write_text(profile_svg(profiles[-1]))
    document: dict[str, Any] = {"profiles": [p.to_json() for p in profiles], "scaling": found.to_json()}
    if not sides:
        document["largest_batch"] = found.largest
    _write(document, output, json)
    if not json:
        Console().print(scaling_table(found))


def _write(document: dict[str, Any], output: Path | None, json: bool) -> None:
    if output is not None:
        output.write_text(json_module.dumps(document) + "\n")
    if json:
        typer.echo(json_module.dumps(document))


def _sizes(text: str, option: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",") if part]
    except ValueError:
        raise typer.BadParameter(f"must be numbers like 1,2,4, not {text!r}", param_hint=option) from None
    if any(size < 1 for size in sizes):
        raise typer.BadParameter("sizes begin at 1", param_hint=option)
    return sizes


def _here() -> Device:
    """This machine's first device; measured on the first call where no catalogue knows it."""
    console = Console(stderr=True)
    with console.status("looking at this machine"):
        return known().devices[0]


def _one(
    job: Job,
    device: Device,
    size: int | None,
    measured: bool,
    seconds: float,
    *,
    quiet: bool,
    image: int | None = None,
) -> Profile:
    if not measured:
        return make_profile(job, device, size=size, image=image)
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("measuring")

        def show(done: int, of: int, name: str) -> None:
            bar.update(task, completed=done, total=of, description=name or "measuring")

        return make_profile(job, device, size=size, image=image, measured=True, time_limit_s=seconds, progress=show)
