"""`outcore demo`: one minute, no GPU, no download."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from outcore.cli.common.options import Json

__all__ = ["demo"]


def demo(
    folder: Annotated[Path, typer.Option("--out", "-o", help="Where to put slides and run.")] = Path("outcore-demo"),
    side: Annotated[int, typer.Option("--side", min=256, help="Pixels of a slide's side.")] = 4096,
    json: Json = False,
) -> None:
    """A slide too large for the budget, looked at, planned, trained on and reported, in about a minute on two cores."""
    from rich.console import Console

    from outcore.train.demo import Demo

    figures = Demo(folder, Console(quiet=json), side=side).run()
    if json:
        typer.echo(json_module.dumps(figures))
