"""`outcore whatif`: what a step would take with another technique, on other GPUs, on more of them."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from outcore.cli.messages import working, wrote
from outcore.cli.options import Arguments, Batch, Inputs, JobName, Json
from outcore.errors import WhatIfError
from outcore.job import Job
from outcore.machine import Device, known, parse
from outcore.whatif.answer import ask
from outcore.whatif.tables import answers_table

__all__ = ["whatif"]


def whatif(
    job: JobName,
    inputs: Inputs = None,
    arguments: Arguments = None,
    batch: Batch = None,
    if_: Annotated[
        list[str] | None,
        typer.Option(
            "--if",
            metavar="TECHNIQUES",
            help="amp, channels_last, compile, fused, graphs, batch=64, within=9GiB, link=2x, BLOCK=free, KIND:0.5x; "
            "joined with +. Repeatable.",
            show_default=False,
        ),
    ] = None,
    on: Annotated[str, typer.Option("--on", help="Other GPUs: a100,l40s,h100.", show_default=False)] = "",
    verify: Annotated[
        bool, typer.Option("--verify", help="Train what can be run here for some steps, and show both.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run every call of the job alone here, and start from that.")
    ] = False,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Time of each trial of --verify.")] = 3.0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also save as JSON.")] = None,
    json: Json = False,
) -> None:
    """Say what a training step would take, if.

        outcore whatif job.py --if amp --if compile --if amp+compile --verify

        outcore whatif job.py --if layer3=free --if conv:0.5x       what work on a part could gain at most
    """
    if not if_:
        raise WhatIfError("nothing was asked; give --if amp, --on a100 or --gpus 1,2,4,8")
    if (verify or measure) and on:
        raise typer.BadParameter("another device cannot be run from here; leave out --on", param_hint="--verify")
    names = [name.strip() for name in on.split(",") if name.strip()]
    devices: list[Device] = [parse(name).devices[0] for name in names] or [_here(quiet=json)]
    found = Job.load(job, inputs=inputs or (), arguments=arguments or ())
    documents: list[dict[str, Any]] = []
    console = Console()
    for device in devices:
        with working(f"asking for {device.name}", quiet=json):
            answers = ask(found, if_, device=device, batch=batch, verify=verify, measure=measure, seconds=seconds)
        documents.append(answers.to_json())
        if not json:
            console.print(answers_table(answers))
    _write({"whatif": documents}, output, json)


def _write(document: dict[str, Any], output: Path | None, json: bool) -> None:
    if output is not None:
        output.write_text(json_module.dumps(document, indent=1) + "\n")
    if json:
        typer.echo(json_module.dumps(document))
    wrote(output)


def _here(*, quiet: bool) -> Device:
    with working("looking at this machine", quiet=quiet):
        return known().devices[0]
