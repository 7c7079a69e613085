"""`outcore graph`: the network as a tree, an adjacency list, an SVG or a page."""

from __future__ import annotations

import json as json_module
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from outcore.cli.common.messages import working, wrote
from outcore.cli.common.options import Arguments, Batch, Inputs, JobName, Json
from outcore.documents.reading import write_text
from outcore.machine.units import format_bytes

if TYPE_CHECKING:
    from outcore.graph import Graph

__all__ = ["graph"]


def graph(
    job: JobName,
    inputs: Inputs = None,
    arguments: Arguments = None,
    batch: Batch = None,
    depth: Annotated[
        int | None,
        typer.Option("--depth", "-d", min=1, help="How deep to look.", show_default="2; all for lists"),
    ] = None,
    expand: Annotated[
        list[str] | None,
        typer.Option("--expand", "-x", metavar="BLOCK", help="Open this block too. Repeatable."),
    ] = None,
    adjacency: Annotated[bool, typer.Option("--adjacency", help="Print which block feeds which.")] = False,
    direction: Annotated[
        str, typer.Option("--direction", help="Which way the lists point: outputs or inputs.")
    ] = "outputs",
    functions: Annotated[bool, typer.Option("--functions", help="Also list functions, not only modules.")] = False,
    skips: Annotated[bool, typer.Option("--skips", help="Print the long skip connections.")] = False,
    cuts: Annotated[bool, typer.Option("--cuts", help="Print where it can be cut, and the bytes that cross.")] = False,
    eval_: Annotated[bool, typer.Option("--eval", help="Record in eval mode.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write a picture.")] = None,
    form: Annotated[
        str, typer.Option("--form", help="Of the picture: portrait, landscape, or u for encoder-decoders.")
    ] = "portrait",
    shade: Annotated[
        str | None, typer.Option("--shade", help="Shade blocks (landscape, u) by time, memory or a plan's file.")
    ] = None,
    on: Annotated[str | None, typer.Option("--on", help="The device of --shade.", show_default="this machine")] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page in which blocks open and close."),
    ] = None,
    json: Json = False,
) -> None:
    """Show a network: its blocks, how they connect, what flows between them.

    Nothing is computed and no memory is used for the data, so any image size will do:

        outcore graph outcore.models:UNet --input 1x3x100000x100000

        outcore graph job.py --depth 1 --adjacency

        outcore graph torchvision.models:resnet50 -i 1x3x224x224 --html resnet50.html

        outcore graph job.py --svg net.svg --form u --shade time --on a100
    """
    from outcore import report
    from outcore.job import Job

    if direction not in ("outputs", "inputs"):
        raise typer.BadParameter(f"must be outputs or inputs, not {direction}", param_hint="--direction")
    if form not in ("portrait", "landscape", "u"):
        raise typer.BadParameter(f"must be portrait, landscape or u, not {form}", param_hint="--form")
    if shade is not None and (form == "portrait" or svg is None):
        raise typer.BadParameter("is for pictures: --svg FILE --form landscape, or u", param_hint="--shade")
    if shade not in (None, "time", "memory") and not Path(str(shade)).is_file():
        raise typer.BadParameter(f"must be time, memory or the file of a plan, not {shade}", param_hint="--shade")
    way: Literal["outputs", "inputs"] = "inputs" if direction == "inputs" else "outputs"
    with working(f"recording {job}", quiet=json):
        found = Job.load(job, inputs=inputs or (), arguments=arguments or ()).capture(batch, training=not eval_)
    opened = tuple(expand or ())
    for path in opened:
        found[path]

    if svg is not None:
        write_text(svg, _picture(found, form, depth, opened, shade, on))
    if html is not None:
        write_text(html, report.page(report.bundle(found, depth=depth)))
    console = Console()
    if json:
        typer.echo(json_module.dumps(found.to_json(), indent=1))
    elif adjacency:
        lists = found.adjacency(depth, way, expand=opened)
        _print_lists(console, _lists_with_functions(found, depth, opened, way) if functions else lists, way)
    elif skips:
        _print_skips(console, found, depth)
    elif cuts:
        _print_cuts(console, found, depth)
    elif svg is None and html is None:
        console.print(report.tree(found, depth=depth or 2, expand=opened))
    wrote(svg, html)
    for note in found.notes:
        Console(stderr=True).print(f"note: {note}", style="yellow", highlight=False)


def _picture(
    graph: Graph, form: str, depth: int | None, opened: tuple[str, ...], shade: str | None, on: str | None
) -> str:
    """The network in one of its forms."""
    from outcore import report

    if form == "portrait":
        return report.svg(graph, depth=depth or 2, expand=opened)
    from outcore.report.graph_drawing.left_to_right import landscape, u_shape

    draw = u_shape if form == "u" else landscape
    return draw(graph, depth=depth or 1, title=graph.root.type, **_shades(graph, shade, on))


def _shades(graph: Graph, shade: str | None, on: str | None) -> dict[str, Any]:
    from outcore.program.plan.document import Plan

    if shade is None:
        return {}
    from outcore.cost.model_estimate import estimate
    from outcore.report.graph_drawing.shading import memory_by_block, moved_by_block, time_by_block

    if shade == "time":
        return {"shade": time_by_block(graph, estimate(graph, machine=on)), "unit": "time of forward and backward"}
    if shade == "memory":
        return {"shade": memory_by_block(graph, estimate(graph, machine=on)), "unit": "memory kept for backward"}
    return {"shade": moved_by_block(graph, Plan.load(shade)), "unit": "memory that the plan does not keep"}


def _lists_with_functions(
    graph: Graph, depth: int | None, opened: tuple[str, ...], way: Literal["outputs", "inputs"]
) -> dict[str, list[str]]:
    """Adjacency in which every call of a function is its own: two calls of ``mean()`` have nothing to do with each
    other, while a module that is called twice is one block."""
    called = graph.view(depth, expand=opened, functions=True, by_call=True).adjacency(way)
    calls = Counter(name.rpartition("#")[0] for name in called)

    def shown(name: str) -> str:
        block = name.rpartition("#")[0] or name
        return name if block.endswith("()") and calls[block] > 1 else block

    lists: dict[str, dict[str, None]] = {}
    for name, others in called.items():
        lists.setdefault(shown(name), {}).update(dict.fromkeys(map(shown, others)))
    return {name: list(others) for name, others in lists.items()}


def _print_lists(console: Console, lists: dict[str, list[str]], direction: str) -> None:
    arrow = "→" if direction == "outputs" else "←"
    width = max(map(len, lists), default=0)
    for name, others in lists.items():
        console.print(f"{name:<{width}} {arrow} {', '.join(others) or '·'}", highlight=False, markup=False)


def _whole_names(table: Table, count: int) -> None:
    """Names in the first columns are folded, not cut, and numbers stay on a line."""
    for i, column in enumerate(table.columns):
        column.overflow, column.no_wrap = "fold", i >= count


def _print_skips(console: Console, graph: Graph, depth: int | None) -> None:
    table = Table("value", "from", "to", "distance", "size", box=None, pad_edge=False, header_style="bold")
    _whole_names(table, 3)
    for skip in graph.skips(depth):
        table.add_row(skip.value, skip.source, skip.target, str(skip.distance), format_bytes(skip.bytes))
    console.print(table if table.rows else "no value is used further away than the next block")


def _print_cuts(console: Console, graph: Graph, depth: int | None) -> None:
    table = Table("after", "before", "values", "crossing", box=None, pad_edge=False, header_style="bold")
    _whole_names(table, 2)
    for cut in graph.cuts(depth):
        table.add_row(cut.after, cut.before, str(len(cut.values)), format_bytes(cut.bytes))
    console.print(table)
