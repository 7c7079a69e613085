"""`outcore verify`: a job's own model, loss and optimizer under a plan, against plain PyTorch."""

from __future__ import annotations

import contextlib
import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from outcore.cli.common.options import Arguments, Batch, Inputs, JobName, Json
from outcore.errors import PlanError
from outcore.machine.units import counted

if TYPE_CHECKING:
    from outcore.verification import Verdict

__all__ = ["verify"]


def verify(
    job: JobName,
    plan_file: Annotated[
        Path | None,
        typer.Argument(metavar="PLAN", help="A plan, of one device or of several ranks; without it one is made."),
    ] = None,
    inputs: Inputs = None,
    arguments: Arguments = None,
    batch: Batch = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", "-m", help="Budget to plan for: 8GiB, or 50% of what plain training takes."),
    ] = None,
    image: Annotated[
        int | None,
        typer.Option("--image", min=1, help="Crop images to this longest side.", show_default="what fits both ways"),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps to compare.")] = 2,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda.", show_default="cuda if there")] = None,
    json: Json = False,
) -> None:
    """Train a few steps under a plan and in plain PyTorch, and compare every parameter.

    Images that are too large for that are cropped; the plan is the one for the whole images. Without a plan and a
    budget, what lies halfway between plain training and the smallest budget is planned for. A plan for several ranks is
    run on as many processes here. Exits with 1 if anything differs.

        outcore verify job.py --batch 2

        outcore verify outcore.models:UNet -i 1x3x2048x2048 --memory 9GiB
    """
    from outcore.job import Job
    from outcore.program.plan.document import Plan
    from outcore.verification import verify_job
    from outcore.verification.on_ranks import JobSource, verify_on_ranks

    if plan_file is not None and not plan_file.is_file():
        raise PlanError(f"no file {plan_file}; make one with: outcore plan {job} --devices 1 -o {plan_file}")
    given = Plan.load(plan_file) if plan_file is not None else None
    size = batch or (given.samples if given is not None else None)
    with contextlib.nullcontext() if json else Console(stderr=True).status("training both ways"):
        if given is not None and (given.ranks > 1 or given.spatial is not None):
            if memory is not None:
                raise PlanError(f"{plan_file} says what every rank holds; leave out --memory, or the plan")
            source = JobSource(job, inputs or (), arguments or ())
            verdict = verify_on_ranks(source, given, size=size, image=image, steps=steps, device=device)
        else:
            loaded = Job.load(job, inputs=inputs or (), arguments=arguments or ())
            verdict = verify_job(loaded, plan=given, memory=memory, size=size, image=image, steps=steps, device=device)
    if json:
        typer.echo(json_module.dumps(verdict.to_json(), indent=1))
    else:
        _show(verdict)
    if not verdict.agrees:
        raise typer.Exit(1)


def _show(verdict: Verdict) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False)
    for name in ("parameter", "largest difference", "over the largest gradient"):
        table.add_column(name, justify="left" if name == "parameter" else "right", overflow="fold")
    worst = sorted(verdict.rows, key=lambda r: -r.relative)
    for row in worst[:8]:
        table.add_row(row.name, f"{row.largest:.3g}", f"{row.relative:.3g}")
    if verdict.crop is not None:
        side, whole = verdict.crop
        console.print(f"on a crop of {side} px of {whole} px; the plan is for the whole", highlight=False)
    console.print(verdict.explained, highlight=False, markup=False)
    console.print()
    console.print(table)
    if len(worst) > 8:
        console.print(f"and {len(worst) - 8} more, none worse", highlight=False)
    equal = sum(row.largest == 0 for row in verdict.rows)
    console.print(
        f"\n{equal} of {counted(len(verdict.rows), 'parameter')}, {verdict.equal_buffers} of "
        f"{counted(verdict.buffers, 'buffer')} and {'all' if verdict.equal_losses else 'not all'} losses bitwise equal "
        f"after {counted(verdict.steps, 'step')}\n{verdict.peaks}",
        highlight=False,
        markup=False,
    )
    if verdict.ranks == 1 and verdict.planned_bytes >= verdict.plain_bytes:
        said = "the plan takes as much as plain training, so this compares little; give a budget: --memory 70%"
        console.print(f"note: {said}", highlight=False, style="yellow")
    console.print(f"verdict: {verdict.grade}", highlight=False, style="green" if verdict.agrees else "red")
