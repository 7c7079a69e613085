"""`outcore plan` for one device: which saved tensors are kept, offloaded, encoded or recomputed, and the frontier
around it.

Where no policy meets the budget, images are streamed in tiles, and the plan says how. `outcore simulate` of such a
plan follows its script call by call, with the figures that the plan was printed with.
"""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console

from outcore.cli.common.messages import table_console, working, wrote
from outcore.cost.costs import Costs
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.estimate import estimate
from outcore.cost.predicted.rough import without_gaps
from outcore.cost.profile import loss_bytes_of_job
from outcore.cost.profile import profile as make_profile
from outcore.documents.reading import write_text
from outcore.graph import Graph
from outcore.job import Job
from outcore.machine import Machine
from outcore.machine.units import format_bytes
from outcore.planner.memory.copy_schedule import tier_of
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.plan import frontier, plan_memory
from outcore.planner.memory.script import update_parts
from outcore.planner.memory.search import Assignment
from outcore.program import Event, Timeline
from outcore.program.plan.document import Plan
from outcore.program.timeline import COMPUTE
from outcore.report.frontier import frontier_json, frontier_svg, frontier_table
from outcore.stream.one_device import OneDeviceStep, fit_one_device, simulate_tiles
from outcore.stream.plan.step_document import StreamedStep

__all__ = ["frontier_on_one_device", "is_for_one_device", "plain_bytes", "plan_on_one_device", "simulate_on_one_device"]


def plain_bytes(job: Job, where: Machine, batch: int | None) -> int:
    """What a plain step is predicted to hold at its peak."""
    return make_profile(job, where.devices[0], size=batch).memory.peak_bytes


def plan_on_one_device(
    job: Job,
    graph: Graph,
    where: Machine,
    budget_bytes: int,
    *,
    batch: int | None,
    output: Path | None,
    svg: Path | None,
    json: bool,
) -> None:
    """Plan a step within a budget and print it."""
    device = where.devices[0]
    optimizer = OptimizerCost.of(job.update, device.kind)
    costs = estimate(graph, where)
    plain = make_profile(job, device, size=batch)
    held = loss_bytes_of_job(job, graph, costs, device, optimizer, size=batch)
    with working("planning", quiet=json):
        step = fit_one_device(
            graph,
            costs,
            where,
            budget_bytes,
            optimizer=optimizer,
            loss_bytes=held,
            plain_s=plain.step.step_s,
            plain_bytes=plain.memory.peak_bytes,
        )
    made = step.plan
    if isinstance(made, StreamedStep):
        if svg is not None:
            with working("searching for faster and smaller steps", quiet=json):
                keeping, whole = frontier_on_one_device(job, graph, costs, where)
            drawn = frontier_svg(
                keeping,
                whole,
                name=f"{graph.root.type} on {device.name}",
                budget_bytes=budget_bytes,
                plain_s=plain.step.step_s,
                plain_bytes=plain.memory.peak_bytes,
                tiles=(step.peak_bytes, step.time_s),
            )
            write_text(svg, drawn)
        document = step.document().for_batch(batch)
        _show_tiles(graph, device.name, budget_bytes, step, document, output=output, json=json)
        wrote(output, svg)
        return
    with working("searching for faster and smaller steps", quiet=json):
        found = frontier(made.keeping, known=[made.assignment])
    document = made.document().for_batch(batch)
    if output is not None:
        document.save(output)
    plain_s, plain_peak = plain.step.step_s, plain.memory.peak_bytes
    if svg is not None:
        name = f"{graph.root.type} on {device.name}"
        drawn = frontier_svg(
            made.keeping,
            found,
            name=name,
            budget_bytes=budget_bytes,
            chosen=made.assignment,
            plain_s=plain_s,
            plain_bytes=plain_peak,
        )
        write_text(svg, drawn)
    if json:
        plan, points = document.to_json(), frontier_json(made.keeping, found, plain_s=plain_s)
        typer.echo(json_module.dumps({"plan": plan, "frontier": points}, indent=1))
        wrote(output, svg)
        return
    console = Console()
    console.print(
        f"{graph.root.type} on {device.name}, within {format_bytes(budget_bytes)}", highlight=False, markup=False
    )
    console.print(str(step), highlight=False, markup=False)
    console.print(made.explain(), highlight=False, markup=False)
    console.print()
    table = frontier_table(made.keeping, found, chosen=made.assignment, plain_s=plain_s, plain_bytes=plain_peak)
    table_console().print(table)
    wrote(output, svg)


def frontier_on_one_device(job: Job, graph: Graph, costs: Costs, where: Machine) -> tuple[StepModel, list[Assignment]]:
    """The fastest step for every budget from plain training down to the smallest."""
    device = where.devices[0]
    optimizer = OptimizerCost.of(job.update, device.kind)
    keeping = StepModel(graph, without_gaps(costs), optimizer, tier_of(where), device.bandwidth_bytes_per_s)
    return keeping, frontier(keeping)


def simulate_on_one_device(
    job: Job, made: Plan, graph: Graph, costs: Costs, where: Machine, size: int | None
) -> Timeline:
    """The timeline of a step by a plan for one device, of the length and the peak that `outcore plan` prints.

    The script has the network's calls, what is made again and the copies; behind them come the wait for the host and
    what a plain step takes beside its network. Where copies queue otherwise than the planner assumed, the step is
    longer than planned by that.
    """
    device = where.devices[0]
    optimizer = OptimizerCost.of(job.update, device.kind)
    plain = make_profile(job, device, size=size)
    if made.stream is not None:
        held = loss_bytes_of_job(job, graph, costs, device, optimizer, size=size)
        return simulate_tiles(
            made, graph, costs, where, optimizer=optimizer, loss_bytes=held, plain_s=plain.step.step_s
        )
    step = plan_memory(
        graph,
        costs,
        budget_bytes=None,
        optimizer=optimizer,
        tier=tier_of(where),
        memory_bytes_per_s=device.bandwidth_bytes_per_s,
        loss_bytes=loss_bytes_of_job(job, graph, costs, device, optimizer, size=size),
        policy=made.policy,
    )
    timeline = step.simulate()
    rest_s = max(0.0, plain.step.step_s - step.keeping.plain_s)
    start_s, end_s = timeline.step_s + min(plain.step.wait_s, rest_s), timeline.step_s + rest_s
    beside = Event(0, COMPUTE, "step", "loss and update", start_s, end_s, stage=0)
    memory = timeline.memory[0].ending_with(update_parts(step.keeping.plain))
    return replace(timeline, name=made.arrangement, events=(*timeline.events, beside), memory=(memory,))


def is_for_one_device(made: Plan) -> bool:
    """Whether a plan is of one device's step, whole or in tiles, with its state on the device."""
    whole = made.ranks == made.micro_batches == made.batches == len(made.stages) == 1
    return made.stream is not None or (whole and made.spatial is None and not made.state)


def _show_tiles(
    graph: Graph,
    device: str,
    budget_bytes: int,
    step: OneDeviceStep,
    document: Plan,
    *,
    output: Path | None,
    json: bool,
) -> None:
    """Print a step in tiles."""
    if output is not None:
        document.save(output)
    if json:
        typer.echo(json_module.dumps({"plan": document.to_json(), "frontier": []}, indent=1))
        return
    console = Console()
    console.print(f"{graph.root.type} on {device}, within {format_bytes(budget_bytes)}", highlight=False, markup=False)
    console.print(str(step), highlight=False, markup=False)
    console.print(step.plan.explain(), highlight=False, markup=False)
