"""`outcore explore`: the page of a job in the browser, or as a file."""

from __future__ import annotations

import importlib.util
import json as json_module
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from outcore.cli.common.messages import working, wrote
from outcore.cli.common.options import Arguments, Batch, Inputs, JobName, Json
from outcore.documents.reading import write_text
from outcore.errors import OutcoreError

__all__ = ["explore"]


def explore(
    job: JobName,
    inputs: Inputs = None,
    arguments: Arguments = None,
    batch: Batch = None,
    image: Annotated[
        int | None, typer.Option("--image", min=1, help="Longest side of the images.", show_default="the job's own")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Folder of a run to show beside it.", show_default="runs/NAME")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option("--machine", "--on", help="h200, 4xa100 or a machine's JSON file.", show_default="this machine"),
    ] = None,
    devices: Annotated[int | None, typer.Option("--devices", "-n", min=1, help="Also plan for so many.")] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", "-m", help="Budget to begin with: 8GiB, or 50% of a plain step's.")
    ] = None,
    measured: Annotated[
        bool, typer.Option("--measure/--estimate", help="Run every block alone on this machine, or run nothing.")
    ] = False,
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="For predictions of other sizes.")] = 20.0,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write the page as one file instead.")
    ] = None,
    port: Annotated[
        int, typer.Option("--port", help="Of the address on this machine.", min=0, max=65535, show_default="a free one")
    ] = 0,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open it in the browser.")] = True,
    json: Json = False,
) -> None:
    """Show a network, its costs and its plans on a page in the browser; it follows the job's file as you edit it.

    Nothing is computed but predictions, so any size and any device will do:

        outcore explore job.py --on a100

        outcore explore torchvision.models:resnet50 -i 64x3x224x224 --on h200 -n 4

        outcore explore job.py --on a100 --export page.html

    The folder of a run shows its job, and the run itself while it goes on:

        outcore explore runs/first
    """
    from outcore.cli.one_device import plain_bytes
    from outcore.explore.parts import ExploreSettings, explore_bundle
    from outcore.job import Job
    from outcore.machine import known, parse
    from outcore.machine.units import parse_budget

    if memory:
        parse_budget(memory, 2**40)  # what is no size is refused before a page is served
    if machine:
        parse(machine)
    base = ExploreSettings(job)
    if Path(job).is_dir():
        from outcore.explore.watched_run import settings_of_run

        base = settings_of_run(Path(job))
    elif ":" not in job and not Path(job).is_file():
        Job.load(job)  # which says what is missing
    if memory and memory.strip().endswith("%"):
        found = Job.load(base.job, inputs=inputs or base.inputs, arguments=arguments or base.arguments)
        with working("looking at a plain step", quiet=json):
            whole = plain_bytes(found, parse(machine) if machine else known(), batch)
        memory = str(parse_budget(memory, whole))
    given = {"batch": batch, "devices": devices, "memory": memory, "run": str(run) if run is not None else None}
    settings = replace(
        base,
        inputs=tuple(inputs or base.inputs),
        arguments=tuple(arguments or base.arguments),
        machine=machine,
        image=image,
        measured=measured,
        seconds=seconds,
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )
    if json or export is not None:
        from outcore.explore.page import explore_page

        with working(f"looking at {job}", quiet=json):
            made = explore_bundle(settings)
        if export is not None:
            write_text(export, explore_page(made))
        if json:
            typer.echo(json_module.dumps(made))
        wrote(export)
        return
    _serve(settings, port, show)


def _serve(settings: object, port: int, show: bool) -> None:
    missing = [name for name in ("starlette", "uvicorn", "watchfiles") if importlib.util.find_spec(name) is None]
    if missing:
        raise OutcoreError(
            f"the live page needs {', '.join(missing)}, which is not installed; type: pip install 'outcore[ui]', "
            "or write the page as a file with --export page.html"
        )
    from outcore.explore.parts import ExploreSettings
    from outcore.explore.server import ExploreServer

    assert isinstance(settings, ExploreSettings)
    server = ExploreServer(settings, port=port)

    def started() -> None:
        typer.echo(f"{settings.job} is shown at {server.address}  (Ctrl-C ends it)")
        sys.stdout.flush()
        if show:
            typer.launch(server.address)

    server.run(started)
