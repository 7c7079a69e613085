"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Arguments", "Batch", "Inputs", "JobName", "Json"]

JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="A Python file with model() and batch(size), or package.module:Class with --input.",
        show_default=False,
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        "-i",
        metavar="SHAPE",
        help="Shape of an input of package.module:Class: 1x3x512x512, 2x128:int64, mask=2x128:bool. Repeatable.",
        show_default=False,
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        "-a",
        metavar="NAME=VALUE",
        help="An argument of the class or of model().",
        show_default=False,
    ),
]
Batch = Annotated[int | None, typer.Option("--batch", "-b", min=1, help="Batch size.", show_default="the job's own")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
