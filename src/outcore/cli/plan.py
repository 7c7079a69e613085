"""`outcore plan` and `outcore simulate`: how to share a network among devices, and what a step would look like."""

from __future__ import annotations

import json as json_module
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from rich.console import Console

from outcore.cli.common.messages import working, wrote
from outcore.cli.common.options import Arguments, Batch, Inputs, JobName, Json
from outcore.documents.reading import read_json, write_text
from outcore.documents.schema import ListOf, Text
from outcore.errors import PlanError
from outcore.machine import Machine, known, parse
from outcore.machine.units import parse_budget

if TYPE_CHECKING:
    from outcore.graph import Graph
    from outcore.planner import CallWeights
    from outcore.program import Timeline
    from outcore.program.plan.document import Plan

__all__ = ["plan", "simulate"]

_MOST_RANKS = 1024
"""Of a grid: for more, laying it out takes longer than anyone waits."""

MachineName = Annotated[
    str | None,
    typer.Option("--machine", "--on", help="v100x8, 4xa100, 2x8xh100 or a JSON file.", show_default="this machine"),
]


def plan(
    job: JobName,
    inputs: Inputs = None,
    arguments: Arguments = None,
    batch: Batch = None,
    devices: Annotated[int | None, typer.Option("--devices", "-n", min=1, help="How many.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", "-m", help="Cap per rank: 8GiB, or 50% of what plain training of the batch takes on one device."
        ),
    ] = None,
    balance: Annotated[str | None, typer.Option("--balance", help="compute or memory; else the fastest.")] = None,
    schedule: Annotated[
        str | None, typer.Option("--schedule", help="One of model_parallel, gpipe, 1f1b, gems.")
    ] = None,
    level: Annotated[
        str, typer.Option("--level", help="Cut between blocks, layers, or modules down to a depth.")
    ] = "layer",
    batch_norm: Annotated[
        str | None,
        typer.Option(
            "--batch-norm", help="What batch norms see: micro_batch, deferred, synchronised (the whole batch)."
        ),
    ] = None,
    vertical: Annotated[
        bool, typer.Option("--vertical", help="Fold a U-Net: each encoder level with its decoder level.")
    ] = False,
    grid: Annotated[
        str | None,
        typer.Option("--grid", help="Share the image: 2x2 ranks, or auto for the fastest arrangement of --devices."),
    ] = None,
    stages: Annotated[Path | None, typer.Option("--stages", help="JSON file: a list of blocks per stage.")] = None,
    machine: MachineName = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Of several devices: run every call alone here, and plan with that.")
    ] = False,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Time of --measure.")] = 60.0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the plan.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="For one device: draw time against memory.")] = None,
    json: Json = False,
) -> None:
    """Decide how to share a network among devices: stages, schedule, micro-batches, replicas.

    Nothing is run, so a plan can be made without the hardware:

        outcore plan outcore.models:UNet -i 8x3x1024x1024 --on v100x4 -m 12GiB -o p.json

    On one device: what is kept for backward, moved, encoded or made again, and the step's time at other budgets:

        outcore plan outcore.models:UNet -i 1x3x4096x4096 --on h200 -m 60GiB --svg f.svg
    """
    from outcore.cli.one_device import plain_bytes, plan_on_one_device
    from outcore.cost.fixed_times import batch_costs
    from outcore.job import Job
    from outcore.planner import SCHEDULES, plan_vertically
    from outcore.planner.pipeline.loss_and_update import LossAndUpdate
    from outcore.planner.pipeline.lower import predicted_by
    from outcore.planner.pipeline.plan_job import UNKNOWN_LINK, batch_for, weights_on
    from outcore.program.plan.document import BatchNorm, Plan
    from outcore.spatial import plan_grid
    from outcore.spatial.choose import plan as make_plan
    from outcore.spatial.plan import is_over_pixels

    if balance not in (None, "compute", "memory"):
        raise typer.BadParameter(f"must be compute or memory, not {balance}", param_hint="--balance")
    if schedule is not None and schedule not in SCHEDULES:
        raise typer.BadParameter(f"must be one of {', '.join(SCHEDULES)}, not {schedule}", param_hint="--schedule")
    if level not in ("block", "layer") and not level.isdecimal():
        raise typer.BadParameter(f"must be block, layer or a depth like 2, not {level}", param_hint="--level")
    if batch_norm is not None and batch_norm not in get_args(BatchNorm):
        wrong = f"must be one of {', '.join(get_args(BatchNorm))}, not {batch_norm}"
        raise typer.BadParameter(wrong, param_hint="--batch-norm")
    where = _machine(machine)
    found = Job.load(job, inputs=inputs or (), arguments=arguments or ())
    count = devices or where.ranks
    explicit = batch is not None or bool(inputs) or vertical or stages is not None or grid is not None
    chosen = batch_for(found, count) if count > 1 and not explicit else None
    with working(f"recording {job}", quiet=json):
        graph = found.capture(batch or chosen)
    budget = where.devices[0].memory_bytes
    if memory:
        plain = plain_bytes(found, where, batch or chosen) if memory.strip().endswith("%") else None
        budget = parse_budget(memory, plain)
    if count == 1 and grid is None and stages is None and not vertical and schedule is None and balance is None:
        if measure:
            raise typer.BadParameter(
                "is for several devices; outcore profile --measure measures one", param_hint="--measure"
            )
        plan_on_one_device(found, graph, where, budget, batch=batch, output=output, svg=svg, json=json)
        return
    with working("measuring every call" if measure else f"looking at every call on {where.name}", quiet=json):
        costs = batch_costs(graph, where, measure_s=seconds if measure else None)
        beside = LossAndUpdate.of(found, graph, costs, where, batch or chosen, measured=measure)
    if grid is not None:
        made = plan_grid(
            graph,
            _grid(grid),
            devices=count,
            memory=budget,
            machine=where,
            costs=costs,
            beside=beside,
            over_pixels=is_over_pixels(found, graph),
        )
        made = made.for_batch(batch)
        if output is not None:
            made.save(output)
        typer.echo(json_module.dumps(made.to_json(), indent=1) if json else str(made))
        wrote(output)
        return
    weights = weights_on(where, graph, costs, beside)
    wanted: dict[str, Any] = {
        "memory_bytes": budget,
        "schedule": schedule,
        "link": where.between_devices or UNKNOWN_LINK,
        "machine": where.fingerprint,
    }
    if stages is not None:
        made = Plan(graph.fingerprint, _stages(stages), cast("Any", schedule) or "gpipe")
        made.validate(graph, ranks=count if devices else None)
        made = predicted_by(_timeline(made, graph, weights, where), made)
    elif vertical:
        made = plan_vertically(graph, weights, ranks=devices, **wanted)
        if devices is None and 1 < where.ranks < made.ranks:
            made = plan_vertically(graph, weights, ranks=where.ranks, **wanted)
    else:
        granularity = cast("Any", int(level) if level.isdecimal() else level)
        with working(f"planning for {count} devices", quiet=json):
            made = make_plan(
                graph,
                devices=count,
                memory=budget,
                machine=where,
                schedule=cast("Any", schedule),
                balance=cast("Any", balance),
                granularity=granularity,
                batch_norm=cast("Any", batch_norm),
                costs=costs,
                beside=beside,
            )
    if chosen is not None and chosen > found.size:
        said = f"a step trains on {chosen} samples, one for each device; --batch {found.size} for the job's own batch"
        made = replace(made, why=(said, *made.why))
    made = made.for_batch(batch)
    if output is not None:
        made.save(output)
    if json:
        typer.echo(json_module.dumps(made.to_json(), indent=1))
    else:
        _show(made, graph, weights, where)
    wrote(output)


def _show(made: Plan, graph: Graph, weights: CallWeights, where: Machine) -> None:
    from outcore.program import rich_gantt

    typer.echo(str(made))
    if made.ranks > 1:
        console = Console()
        console.print()
        console.print(rich_gantt(_timeline(made, graph, weights, where), width=console.width))
    if made.predicted is not None and made.predicted.bubble > 0.5:
        idle = f"ranks wait for {made.predicted.bubble:.0%} of the step"
        typer.echo(f"{idle}: a larger --batch gives them micro-batches to share; fewer --devices wait less")


def simulate(
    job: JobName,
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan, as `outcore plan -o` writes it.")],
    inputs: Inputs = None,
    arguments: Arguments = None,
    batch: Batch = None,
    machine: MachineName = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a trace for Perfetto.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the timeline.")] = None,
    json: Json = False,
) -> None:
    """Show what a training step by a plan would look like, rank by rank; of one in tiles, tile by tile."""
    from outcore.cli.one_device import is_for_one_device, simulate_on_one_device
    from outcore.cost.fixed_times import batch_costs
    from outcore.cost.predicted.estimate import estimate
    from outcore.job import Job
    from outcore.planner.pipeline.loss_and_update import LossAndUpdate
    from outcore.planner.pipeline.plan_job import batch_for, weights_on
    from outcore.program import chart, rich_gantt, save_trace
    from outcore.program.plan.document import Plan

    if not plan_file.is_file():
        raise PlanError(f"no file {plan_file}; make one with: outcore plan {job} --devices 4 -o {plan_file}")
    where = _machine(machine)
    made = Plan.load(plan_file)
    if made.machine not in (None, where.fingerprint):
        shown = "this machine" if machine is None else machine
        typer.echo(f"the plan was made for another machine; these are the times of {shown} (--machine)", err=True)
    found = Job.load(job, inputs=inputs or (), arguments=arguments or ())
    size = batch or made.samples or (batch_for(found, made.ranks) if made.ranks > 1 and not inputs else None)
    graph = found.capture(size)
    if is_for_one_device(made):
        costs = estimate(graph, where)
        timeline = simulate_on_one_device(found, made, graph, costs, where, size)
    else:
        costs = batch_costs(graph, where)
        beside = LossAndUpdate.of(found, graph, costs, where, size)
        timeline = _timeline(made, graph, weights_on(where, graph, costs, beside), where)
    if trace is not None:
        save_trace(timeline, trace)
    if svg is not None:
        write_text(svg, chart(timeline))
    if json:
        typer.echo(json_module.dumps(timeline.to_json()))
    else:
        console = Console()
        console.print(f"{found.name}, batch {size or found.size}, on {where.name}", highlight=False, markup=False)
        console.print(rich_gantt(timeline, width=console.width))
    wrote(trace, svg)


def _grid(text: str) -> tuple[int, ...] | None:
    """The numbers of ``2x2``; None for ``auto``."""
    if text == "auto":
        return None
    parts = text.split("x")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"must be auto or numbers like 2x2, not {text}", param_hint="--grid")
    if (ranks := math.prod(map(int, parts))) > _MOST_RANKS:
        raise typer.BadParameter(f"{text} are {ranks:,} ranks; give {_MOST_RANKS:,} at most", param_hint="--grid")
    return tuple(int(part) for part in parts)


def _machine(name: str | None) -> Machine:
    if name is not None:
        return parse(name)
    with working("looking at this machine"):
        return known()


def _stages(path: Path) -> tuple[tuple[str, ...], ...]:
    """What a file of --stages holds: `[["stem", "layer1"], ["layer2"]]`."""
    try:
        read: list[list[str]] = read_json(path, ListOf(ListOf(Text(1), least=1), least=1), PlanError)
    except PlanError as error:
        raise PlanError(f'{error}; write the blocks of each stage: [["stem", "layer1"], ["layer2"]]') from None
    return tuple(map(tuple, read))


def _timeline(made: Plan, graph: Graph, weights: CallWeights, machine: Machine) -> Timeline:
    from outcore.planner.pipeline.plan_job import links_of
    from outcore.spatial.timeline import predict_timeline

    return predict_timeline(made, graph, weights, links_of(machine))
