"""`outcore machine`: what this machine, or a known one, can do.

Probes on the first call (about ten seconds without a GPU), and shows what it remembers afterwards. With --calibrate it
also measures a sweep of operations, which predictions for this machine then use; repeating it makes them better.
"""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outcore.cli.common.messages import wrote
from outcore.errors import MachineError
from outcore.machine import Machine, catalogue_table, find, machine_table, names, parse, probe

if TYPE_CHECKING:
    from rich.console import Console

    from outcore.cost.predicted.calibration import Calibration

__all__ = ["machine"]


def machine(
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again instead of recalling.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also save the machine to this file.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the known GPUs.")] = False,
    name: Annotated[
        str | None,
        typer.Option("--on", help="Show this machine instead: h200, v100x8, 2x8xa100, or a JSON file."),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure operations, so that their times can be predicted.")
    ] = False,
    seconds: Annotated[float, typer.Option("--seconds", help="Time for --calibrate; more is better.", min=1)] = 240,
) -> None:
    """Probe this machine and show it; or show one from the catalogue."""
    from rich.console import Console

    console = Console()
    if list_:
        _show_catalogue(console, as_json=json)
        return
    shown = parse(name) if name is not None else _probe(fresh=fresh, quiet=json)
    if calibrate and name is not None:
        raise MachineError(f"only this machine can be calibrated, not {name!r}; leave out --on or --calibrate")
    if output is not None:
        shown.save(output)
        wrote(output)
    if json:
        typer.echo(json_module.dumps(shown.to_json(), indent=2))
    else:
        console.print(machine_table(shown))
    if calibrate:
        _calibrate(shown, seconds=seconds)


def _calibrate(shown: Machine, *, seconds: float) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from outcore.cost.measured.calibrate import calibrate
    from outcore.cost.predicted.calibration import file_name
    from outcore.machine.probe import cache_directory

    device = shown.device()
    dtypes, place = (("tf32", "bf16"), "cuda:0") if device.kind == "cuda" else (("fp32",), "cpu")
    errors = Console(stderr=True)
    try:
        columns = BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
        with Progress(*columns, console=errors, transient=True) as bar:
            task = bar.add_task("calibrating", total=None)

            def tell(used: float, allowed: float, words: str) -> None:
                bar.update(task, completed=used, total=allowed, description=words)

            fitted = calibrate(device, place, dtypes=dtypes, seconds=seconds, progress=tell)
    except KeyboardInterrupt:
        typer.echo("interrupted; the samples are kept, run with --calibrate again to go on", err=True)
        raise typer.Exit(130) from None
    for calibration in fitted:
        show_calibration(calibration, errors)
        wrote(cache_directory() / file_name(device.name, calibration.dtype))


def show_calibration(calibration: Calibration, console: Console) -> None:
    """How well each kind of operation is predicted, and which kinds were measured too little to be."""
    from rich.table import Table

    from outcore.cost.predicted.calibration import LEAST
    from outcore.cost.predicted.operation import KINDS

    table = Table("kind", "samples", "fit", "median error", "nine in ten", box=None, pad_edge=False)
    for column in (1, 3, 4):
        table.columns[column].justify = "right"
    for kind, (samples, method, median, p90) in calibration.errors().items():
        table.add_row(kind, f"{samples:,}", method, f"{median:.1%}", f"{p90:.1%}")
    if calibration.models:
        console.print(f"errors of predicted times, {calibration.dtype}", highlight=False)
        console.print(table)
    names = [f"{kind}/{direction}" for kind in KINDS for direction in ("forward", "backward")]
    known = {name for name, model in calibration.models.items() if model.samples >= LEAST}
    if few := [name for name in names if name not in known and name != "copy/backward"]:
        said = f"few samples of {', '.join(few)}: these are predicted mostly by their FLOPs and bytes"
        console.print(f"{said}; the same command again goes on measuring", highlight=False)


def _show_catalogue(console: object, *, as_json: bool) -> None:
    from rich.console import Console

    if as_json:
        rows = {key: parse(key).to_json() | {"source": find(key).source} for key in names()}
        typer.echo(json_module.dumps(rows, indent=2))
    elif isinstance(console, Console):
        # Wide enough for every column, also where the terminal's width is not known.
        Console(width=max(console.width, 132)).print(catalogue_table())


def _probe(*, fresh: bool, quiet: bool) -> Machine:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    errors = Console(stderr=True, quiet=quiet)
    try:
        if not errors.is_terminal:
            return probe(fresh=fresh, progress=lambda done, total, words: errors.print(f"{done}/{total} {words}"))
        with Progress(BarColumn(), TextColumn("{task.description}"), console=errors, transient=True) as bar:
            task = bar.add_task("probing", total=None)
            return probe(
                fresh=fresh,
                progress=lambda done, total, words: bar.update(task, completed=done, total=total, description=words),
            )
    except KeyboardInterrupt:
        typer.echo("interrupted; what was measured is kept, run `outcore machine` again to go on", err=True)
        raise typer.Exit(130) from None
