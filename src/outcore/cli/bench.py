"""`outcore bench`: eight model families, what each reaches on this machine, and how two machines compare."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from outcore.cli.common.messages import working, wrote
from outcore.cli.common.options import Json
from outcore.documents.reading import read_json, write_text
from outcore.documents.schema import MapOf
from outcore.errors import OutcoreError
from outcore.machine import format_bytes, format_time, known

if TYPE_CHECKING:
    from outcore.bench.suite import BenchResult, FamilyResult

__all__ = ["bench"]


def bench(
    only: Annotated[
        str, typer.Option("--only", help="Families, by a part of their names: image,speech.", show_default="all")
    ] = "",
    reduced: Annotated[
        bool | None,
        typer.Option(
            "--reduced/--full", help="Small networks, or those of the papers.", show_default="reduced on a CPU"
        ),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="How long steps of each are repeated.")] = 3.0,
    against: Annotated[Path | None, typer.Option("--against", help="JSON of another machine, to compare with.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also save as JSON.")] = None,
    page: Annotated[Path | None, typer.Option("--page", help="Also write a page for a browser.")] = None,
    json: Json = False,
) -> None:
    """Train eight model families for some steps each: throughput, how busy the device is, memory by what it holds.

    outcore bench -o here.json --page here.html

    outcore bench --against there.json
    """
    from outcore.bench.families import FAMILIES, family
    from outcore.bench.suite import run_suite

    names = [part.strip() for part in only.split(",") if part.strip()] or list(FAMILIES)
    for name in names:
        family(name)
    other = _other(against) if against is not None else {}
    device = known().devices[0]
    small = device.kind == "cpu" if reduced is None else reduced

    def save(found: BenchResult) -> None:
        if output is not None:
            write_text(output, json_module.dumps(found.to_json(), indent=1) + "\n")
        if page is not None:
            write_text(page, found.page())

    with working("training", quiet=json):
        found = run_suite(names, reduced=small, seconds=seconds, device=device, each=save)
    if json:
        typer.echo(json_module.dumps(found.to_json()))
    else:
        Console(width=max(Console().width, 132)).print(_table(found, other))
    wrote(output, page)


def _other(path: Path) -> dict[str, float]:
    """Samples per second of every family on another machine."""
    document = read_json(path, MapOf(), OutcoreError)
    rows = document.get("families")
    if not isinstance(rows, list) or not all(isinstance(r, dict) and "family" in r for r in rows):
        raise OutcoreError(f"{path} is not a result of outcore bench; make one with outcore bench -o {path.name}")
    return {row["family"]: row.get("samples_per_s", 0.0) for row in rows}


def _table(found: BenchResult, other: dict[str, float]) -> Table:
    size = "reduced" if found.reduced else "full"
    table = Table(
        title=f"{found.device}, torch {found.torch}, {size} size", title_justify="left", box=None, pad_edge=False
    )
    table.add_column("family", no_wrap=True)
    for name in (
        "batch",
        "step",
        "samples/s",
        *(("over the other",) if other else ()),
        "busy",
        "of peak",
        "CPU",
        "peak",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("memory, by what it holds", overflow="fold")
    for f in found.families:
        if f.error:
            table.add_row(f.family, str(f.batch), f.error)
            continue
        ratio = (f"{f.samples_per_s / other[f.family]:.2f}x" if other.get(f.family) else "",) if other else ()
        table.add_row(f.family, str(f.batch), format_time(f.step_s), f"{f.samples_per_s:,.1f}", *ratio, *_shares(f))
    return table


def _shares(f: FamilyResult) -> tuple[str, ...]:
    busy = "" if f.busy_share is None else f"{f.busy_share:.0%}"
    peak = ", ".join(f"{name} {share:.0%}" for name, share in f.peak_share.items())
    return busy, peak, f"{f.cpu_share:.0%}", format_bytes(f.peak_bytes), f.held
