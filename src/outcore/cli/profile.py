"""`outcore profile`: what a training step takes, block by block."""

from __future__ import annotations

import json as json_module
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from outcore.cli.common.messages import Interruption, table_console, working, wrote
from outcore.cli.common.options import Arguments, Inputs, JobName, Json
from outcore.documents.reading import write_text
from outcore.machine import Device, Machine, known, parse

if TYPE_CHECKING:
    from outcore.cost.predicted.scaling import Scaling
    from outcore.cost.profile import Profile
    from outcore.job import Job
    from outcore.planner.memory.evaluate import StepModel
    from outcore.planner.memory.search import Assignment
    from outcore.scan.study.analyse import Analysis

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
    frontier: Annotated[
        bool, typer.Option("--frontier", help="Also find the fastest step for smaller budgets.")
    ] = False,
    scan: Annotated[
        bool, typer.Option("--scan", help="Also say whether back-propagation as a parallel scan could pay.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Also draw where the time goes; with --frontier, that beside it.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also save as JSON.")] = None,
    json: Json = False,
) -> None:
    """Show what a training step takes: time and memory, by block and by kind of layer.

    By estimate nothing is run, so any size and any device will do:

        outcore profile torchvision.models:resnet50 -i 1x3x100000x100000 --on h200

        outcore profile job.py --measure --batch 1,2,4

        outcore profile job.py --on a100 --image 512,1024,2048 --svg profile.svg

        outcore profile job.py --on a100 --frontier --svg profile.svg
    """
    from outcore.cost.profile import largest_batch
    from outcore.job import Job
    from outcore.report.frontier import frontier_json, frontier_svg, frontier_table
    from outcore.report.profile import ProfileView
    from outcore.report.profile_svg import profile_svg

    if on is not None and measured:
        raise typer.BadParameter("another device cannot be measured from here; leave out --measure", param_hint="--on")
    sizes, sides = _sizes(batch, "--batch"), _sizes(image, "--image")
    if len(sizes) > 1 and sides:
        raise typer.BadParameter("several batch sizes or several image sizes, not both", param_hint="--image")
    if frontier and (len(sizes) > 1 or sides):
        raise typer.BadParameter("a frontier is of one size; give one --batch and no --image", param_hint="--frontier")
    if scan and (len(sizes) > 1 or sides):
        raise typer.BadParameter("a scan is of one size; give one --batch and no --image", param_hint="--scan")
    where = parse(on) if on is not None else _here()
    device = where.devices[0]
    found = Job.load(job, inputs=inputs or (), arguments=arguments or ())
    if len(sizes) > 1 or sides:
        _show_sizes(found, device, sizes, sides, measured=measured, seconds=seconds, output=output, json=json, svg=svg)
        return
    shown = _one(found, device, sizes[0] if sizes else None, measured, seconds, quiet=json)
    with working("looking for the largest batch that fits", quiet=json):
        best = largest_batch(found, device) if largest else None
    curve = _frontier(found, shown, where, quiet=json) if frontier else None
    chain = _chain(shown, quiet=json) if scan else None
    beside: Path | None = None
    if svg is not None:
        write_text(svg, profile_svg(shown))
        if curve is not None:
            name = f"{shown.job} on {device.name}"
            drawn = frontier_svg(*curve, name=name, plain_s=shown.step.step_s)
            beside = svg.with_name(f"{svg.stem}-frontier{svg.suffix}")
            write_text(beside, drawn)
    document: dict[str, Any] = {"profiles": [shown.to_json()], "largest_batch": best}
    if curve is not None:
        document["frontier"] = frontier_json(*curve, plain_s=shown.step.step_s)
    if chain is not None:
        document["scan"] = chain.to_json()
    _write(document, output, json)
    if not json:
        console = table_console()
        console.print(ProfileView(shown, depth=depth))
        if best is not None:
            console.print(f"largest batch that fits: {best}", highlight=False)
        if curve is not None:
            console.print()
            console.print(frontier_table(*curve, plain_s=shown.step.step_s))
        if chain is not None:
            console.print()
            console.print(str(chain), highlight=False, markup=False, soft_wrap=True)
    wrote(svg, beside, output)


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
    """A table over batch or image sizes: by estimate, or with --measure by measured blocks and what follows of them."""
    from outcore.cli.common.image_sizes import multiple_of, scale_images
    from outcore.cost.profile import scale
    from outcore.report.profile import scaling_table
    from outcore.report.profile_svg import profile_svg

    first = sizes[0] if sizes else None
    with working("predicting", quiet=json):
        if sides:
            multiple = multiple_of(job, first, sides[0])
            sides = _taken(sides, multiple, quiet=json)
            found = scale_images(job, device, sides, first, multiple)
        else:
            found = scale(job, device, sizes=sizes)
    profiles = []
    if measured:
        known = {p.size for p in found.points}
        for size in (s for s in sides or sizes if s in known):
            batch, side = (first, size) if sides else (size, None)
            profiles.append(_one(job, device, batch, True, seconds, quiet=json, image=side))
        found = from_measured(found, dict(zip((s for s in sides or sizes if s in known), profiles, strict=True)))
    else:
        profiles = [_one(job, device, size, False, seconds, quiet=True) for size in sizes]
    if svg is not None:
        side = next((side for side in reversed(sides) if side not in found.failures), None)
        last = profiles[-1] if profiles else _one(job, device, first, False, seconds, quiet=True, image=side)
        write_text(svg, profile_svg(last))
    document: dict[str, Any] = {"profiles": [p.to_json() for p in profiles], "scaling": found.to_json()}
    if not sides:
        document["largest_batch"] = found.largest
    _write(document, output, json)
    if not json:
        table_console().print(scaling_table(found))
        for side, reason in found.failures.items():
            Console().print(f"{found.along} {side}: {reason}", style="yellow", highlight=False, markup=False)
    wrote(svg, output)


def _taken(sides: list[int], multiple: int, *, quiet: bool) -> list[int]:
    """The sides that the network accepts; printed where they differ from those that were asked for."""
    from outcore.cli.common.image_sizes import rounded

    taken = sorted({rounded(side, multiple) for side in sides})
    if taken != sorted(set(sides)) and not quiet:
        said = f"this network takes sides in multiples of {multiple}: {', '.join(map(str, taken))}"
        Console(stderr=True).print(said, highlight=False)
    return taken


def from_measured(found: Scaling, profiles: dict[int, Profile]) -> Scaling:
    """A prediction corrected by what was measured: steps that were, and the others by the ratio at the nearest."""
    if not profiles:
        return found
    ratios = {p.size: profiles[p.size].step.step_s / p.step_s for p in found.points if p.size in profiles}
    points = []
    for p in found.points:
        if p.size in profiles:
            step = profiles[p.size].step
            points.append(replace(p, step_s=step.step_s, low_s=step.interval_s[0], high_s=step.interval_s[1]))
            points[-1] = replace(points[-1], measured_s=step.step_s)
        else:
            ratio = ratios[min(ratios, key=lambda size: abs(math.log(size / p.size)))]
            scaled = {name: getattr(p, name) * ratio for name in ("step_s", "low_s", "high_s")}
            points.append(replace(p, **scaled))
    return replace(found, points=tuple(points))


def _write(document: dict[str, Any], output: Path | None, json: bool) -> None:
    if output is not None:
        write_text(output, json_module.dumps(document) + "\n")
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


def _here() -> Machine:
    """This machine; measured on the first call where it is not in the catalogue."""
    with working("looking at this machine"):
        return known()


def _frontier(job: Job, shown: Profile, where: Machine, *, quiet: bool) -> tuple[StepModel, list[Assignment]]:
    """The fastest step for every budget."""
    from outcore.cli.one_device import frontier_on_one_device

    with working("searching for faster and smaller steps", quiet=quiet):
        return frontier_on_one_device(job, shown.graph, shown.costs, where)


def _chain(shown: Profile, *, quiet: bool) -> Analysis:
    """What a scan over the network's chain of layers would take, beside back-propagation."""
    from outcore.scan.study.analyse import analyse

    with working("looking for a chain to scan", quiet=quiet):
        return analyse(shown.graph)


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
    from outcore.cost.profile import profile as make_profile

    if not measured:
        with working("estimating", quiet=quiet):
            return make_profile(job, device, size=size, image=image)
    with (
        Interruption() as interruption,
        Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar,
    ):
        task = bar.add_task("measuring")

        def show(done: int, of: int, name: str) -> None:
            interruption.check()
            bar.update(task, completed=done, total=of, description=name or "measuring")

        return make_profile(job, device, size=size, image=image, measured=True, time_limit_s=seconds, progress=show)
