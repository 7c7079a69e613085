"""`outcore report`: the page of a run."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from outcore.cli.common.options import Json
from outcore.documents.reading import write_text

__all__ = ["report"]


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page.", show_default="report.html in the folder")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    json: Json = False,
) -> None:
    """Show a run as one page: curves, plan, predicted beside measured. It may still be going on.

    outcore report runs/first --open
    """
    from outcore.report import page, run_bundle
    from outcore.report.run import read_run

    if json:
        typer.echo(json_module.dumps(read_run(run)))
        return
    target = output or run / "report.html"
    made = page(run_bundle(run))
    write_text(target, made)
    typer.echo(f"wrote {target}")
    if show:
        typer.launch(target.resolve().as_uri())
