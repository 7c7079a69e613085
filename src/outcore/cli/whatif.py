"""`outcore whatif`: what a step would take with another technique, on other GPUs, on more of them."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table

from outcore.cli.common.messages import working, wrote
from outcore.cli.common.options import Arguments, Batch, Inputs, JobName, Json
from outcore.documents.reading import write_text
from outcore.errors import WhatIfError
from outcore.machine import Device, known, parse

if TYPE_CHECKING:
    from outcore.whatif.links import ClusterLink
    from outcore.whatif.techniques import Technique

__all__ = ["whatif"]

_MOST_GPUS = 1 << 20


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
    gpus: Annotated[str, typer.Option("--gpus", help="Numbers of GPUs: 1,2,4,8.", show_default=False)] = "",
    link: Annotated[
        str, typer.Option("--link", help="Between GPUs: nvlink, pcie4, 10gbe, 25gbe, ib-hdr, 25gbit, 1gbit+20ms.")
    ] = "25gbe",
    how: Annotated[
        str, typer.Option("--how", help="How GPUs are used: data_parallel, sharded, gpipe, 1f1b, gems.")
    ] = "data_parallel,sharded",
    strong: Annotated[
        bool, typer.Option("--strong/--weak", help="Divide the batch among GPUs, or give it to each.")
    ] = False,
    price: Annotated[
        str,
        typer.Option("--price", help="Of an hour of each GPU of --on, or one for all: 2.5,1.1.", show_default=False),
    ] = "",
    watts: Annotated[str, typer.Option("--watts", help="Power of each GPU of --on.", show_default=False)] = "",
    epoch: Annotated[int | None, typer.Option("--epoch", min=1, help="Samples of an epoch, for --price.")] = None,
    largest: Annotated[bool, typer.Option("--largest", help="With --on: find the largest batch that fits.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Train what can be run here for some steps, and show both.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run every call of the job alone here, and start from that.")
    ] = False,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Time of each trial of --verify.")] = 3.0,
    svg: Annotated[Path | None, typer.Option("--svg", help="Also draw the scaling of --gpus.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also save as JSON.")] = None,
    json: Json = False,
) -> None:
    """Say what a training step would take, if.

    outcore whatif job.py --if amp --if compile --if amp+compile --verify

    What work on a part could gain at most, other GPUs and more of them:

    outcore whatif job.py --if layer3=free --if conv:0.5x

    outcore whatif job.py --on a100,l40s,h100 --price 1.8,1.0,2.9 --epoch 1281167

    outcore whatif job.py --on v100 --gpus 1,2,4,8,16 --link 25gbe --svg scaling.svg
    """
    from outcore.job import Job
    from outcore.whatif.answer import ask
    from outcore.whatif.elsewhere import measured_here, try_gpus
    from outcore.whatif.links import parse_link
    from outcore.whatif.scaling import scale_out
    from outcore.whatif.scaling_plot import scaling_svg
    from outcore.whatif.setup import TrainingSetup
    from outcore.whatif.tables import answers_table, gpus_table, scaling_table
    from outcore.whatif.techniques import parse_techniques

    questions = if_ or []
    if not (questions or on or gpus):
        raise WhatIfError("nothing was asked; give --if amp, --on a100 or --gpus 1,2,4,8")
    if verify and (on or gpus):
        option = "--on" if on else "--gpus"
        raise typer.BadParameter(f"other devices cannot be run from here; leave out {option}", param_hint="--verify")
    if verify and not questions:
        raise typer.BadParameter("only what --if asks for can be run here", param_hint="--verify")
    if svg is not None and not gpus:
        raise typer.BadParameter("a plot is of --gpus", param_hint="--svg")
    techniques = [parse_techniques(question) for question in dict.fromkeys(questions)]
    questions = list(dict.fromkeys(questions))
    prices, power = _numbers(price, "--price"), _numbers(watts, "--watts")
    names, ways = _words(on, "--on", "a100,h100"), _words(how, "--how", "data_parallel,sharded")
    for given, option in ((prices, "--price"), (power, "--watts"), (largest, "--largest")):
        if given and (questions or gpus or not names):
            raise typer.BadParameter("is of --on, without --if or --gpus", param_hint=option)
    if (prices or power) and epoch is None:
        raise typer.BadParameter(
            "how many samples has an epoch? give --epoch", param_hint="--price" if prices else "--watts"
        )
    if svg is not None and len(names) * len(questions or [""]) > 1:
        raise typer.BadParameter("a plot is of one GPU and one question; ask one at a time", param_hint="--svg")
    devices: list[Device] = [parse(name).devices[0] for name in names] or [_here(quiet=json)]
    for figures, option in ((prices, "--price"), (power, "--watts")):
        if len(figures) > 1 and len(figures) != len(names):
            raise typer.BadParameter(
                f"{len(figures)} figures for {len(names)} GPUs; give one, or one for each", param_hint=option
            )
    counts = _counts(gpus)
    joined = [parse_link(link, device) for device in devices] if counts else []
    found = Job.load(job, inputs=inputs or (), arguments=arguments or ())
    console = Console()
    # Tables are wide enough for every column, also where the terminal's width is not known; sentences are not.
    wide = Console(width=max(console.width, 132))
    document: dict[str, Any] = {}

    def show(key: str, value: Any, table: RenderableType) -> None:
        document.setdefault(key, []).append(value.to_json())
        if not json:
            for part in table.renderables if isinstance(table, Group) else [table]:
                (wide if isinstance(part, Table) else console).print(part)
            console.print()

    here = known().devices[0] if measure else None
    recorders = [measured_here(here, device) if here is not None else None for device in devices]
    if counts:
        mode: Literal["weak", "strong"] = "strong" if strong else "weak"
        for device, between, recorder in zip(devices, joined, recorders, strict=True):
            for text, used in list(zip(questions, techniques, strict=True)) or [("", ())]:
                with working(f"scaling over {between.name}", quiet=json):
                    scaled = scale_out(
                        found, counts, _linked(between, used), device=device, batch=batch, mode=mode, strategies=ways,
                        techniques=tuple(t.on(device) for t in used), base=recorder,
                    )  # fmt: skip
                shown = replace(scaled, job=f"{scaled.job} with {text}") if text else scaled
                show("scaling", shown, scaling_table(shown))
                if svg is not None:
                    write_text(svg, scaling_svg(shown))
    elif names and not questions:
        with working("measuring every call" if measure else "carrying over", quiet=json):
            measured = measured_here(here, here)(TrainingSetup(found, batch)) if here is not None else None
            others = try_gpus(
                found, devices, batch=batch, here=measured, largest=largest, prices=prices, epoch_samples=epoch,
                watts=power,
            )  # fmt: skip
        show("on", others, gpus_table(others))
    else:
        for device in devices:
            with working(f"asking for {device.name}", quiet=json):
                answers = ask(
                    found, questions, device=device, batch=batch, verify=verify, measure=measure, seconds=seconds
                )
            show("if", answers, answers_table(answers))
    _write(document, output, json)
    wrote(svg)


def _linked(link: ClusterLink, techniques: Sequence[Technique]) -> ClusterLink:
    """A link as fast as techniques make it."""
    from outcore.whatif.techniques import FasterLink

    for technique in techniques:
        if isinstance(technique, FasterLink):
            link = replace(link.faster(technique.factor), name=f"{link.name} x {technique.factor:g}")
    return link


def _words(text: str, option: str, example: str) -> list[str]:
    """Names between commas, each once; an option that is given names something."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if text and not found:
        raise typer.BadParameter(f"must be names like {example}, not {text!r}", param_hint=option)
    return found


def _numbers(text: str, option: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise typer.BadParameter(f"must be numbers like 1,2,4, not {text!r}", param_hint=option) from None
    if any(not 0 < value < float("inf") for value in found):
        raise typer.BadParameter("numbers must be above 0", param_hint=option)
    return found


def _counts(text: str) -> list[int]:
    """Numbers of GPUs."""
    found = _numbers(text, "--gpus")
    if any(value != int(value) or value > _MOST_GPUS for value in found):
        raise typer.BadParameter(f"must be whole numbers up to {_MOST_GPUS:,}, not {text!r}", param_hint="--gpus")
    return [int(value) for value in found]


def _write(document: dict[str, Any], output: Path | None, json: bool) -> None:
    if output is not None:
        write_text(output, json_module.dumps(document, indent=1, allow_nan=False) + "\n")
    if json:
        typer.echo(json_module.dumps(document, allow_nan=False))
    wrote(output)


def _here(*, quiet: bool) -> Device:
    with working("looking at this machine", quiet=quiet):
        return known().devices[0]
