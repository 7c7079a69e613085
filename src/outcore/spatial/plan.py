"""Which grid: from a job and a number of ranks to a plan whose first stage shares the image.

Every way to arrange the ranks over the axes is laid out and timed; the fastest whose bytes fit is taken. For each grid
there is one more choice: a halo that costs more to wait for than to compute is computed on both sides of the cut
(``twice``). Exchanges are tried in order, and one is given up where the step becomes faster without it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outcore.cost.costs import Costs
from outcore.cost.predicted.estimate import estimate
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.job import Job
from outcore.machine import Machine, known, parse
from outcore.machine.link import Link
from outcore.machine.units import format_bytes, format_time, parse_bytes
from outcore.ops.region import sizes
from outcore.plan_document import Plan, PredictedStep
from outcore.spatial.extent import split_extent
from outcore.spatial.forecast import SplitForecast, rank_bytes, split_forecast
from outcore.spatial.layout import SplitLayout, lay_out
from outcore.spatial.parts import PartGrid, shape_of
from outcore.stage_names import name_stages
from outcore.stream.network import RegionNetwork

__all__ = ["plan_grid"]

UNKNOWN_LINK = Link.symmetric(bandwidth_bytes_per_s=12e9, latency_s=10e-6)
_TRIED = 48
"""Exchanges that are tried to be computed twice."""


@dataclass(frozen=True)
class _Choice:
    layout: SplitLayout
    twice: tuple[str, ...]
    forecast: SplitForecast


def plan_grid(
    source: Job | Graph,
    grid: Sequence[int] | None = None,
    *,
    devices: int | None = None,
    memory: str | int | None = None,
    machine: str | Machine | None = None,
    batch: int | None = None,
    costs: Costs | None = None,
) -> Plan:
    """Share the image of a network among ranks.

    >>> import outcore, torch
    >>> job = outcore.Job(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Conv2d(4, 2, 3, padding=1)),
    ...     batch=lambda size: (torch.randn(size, 3, 64, 64), torch.randn(size, 2, 64, 64)),
    ...     size=1,
    ... )
    >>> outcore.spatial.plan_grid(job, (2, 2), machine="4xv100").ranks
    4

    Args:
        source: a job, or a graph that was recorded with the batch of one step.
        grid: ranks along each pixel axis; the fastest that fits, if not given.
        devices: how many, where no grid is given; all of the machine's if not given.
        memory: what no rank may exceed, like ``"8GiB"``; all that a device has if not given.
        machine: ``"v100x8"``, a machine, or the path of one; this machine if not given.
        batch: samples of a step; the job's own if not given.
        costs: of every call; estimated for the machine if not given.

    Raises:
        PlanError: nothing of the network can be split, or no grid fits; says the least that would.
    """
    where = parse(machine) if isinstance(machine, str) else machine or known()
    graph = source.capture(batch) if isinstance(source, Job) else source
    limit = parse_bytes(memory) if isinstance(memory, str) else memory or where.devices[0].memory_bytes
    costs = costs if costs is not None else estimate(graph, where)
    network = RegionNetwork(graph)
    count = devices or where.ranks
    grids = [shape_of(tuple(grid), network.rank)] if grid is not None else list(_grids(count, network))
    link = where.between_devices or UNKNOWN_LINK
    found = sorted((_choice(network, counts, costs, link) for counts in grids), key=lambda c: c.forecast.time_s)
    if not found:
        raise PlanError(f"no grid of {count} ranks fits an image of {_image(network)}; take fewer ranks")
    least = 0
    for number, choice in enumerate(found):
        choice = _with_overlap(choice, costs, link)
        peaks = _peaks(choice.layout)
        if max(peaks) <= limit:
            return _plan(graph, choice, peaks, where, limit, found[:number] + found[number + 1 :])
        least = max(peaks) if not least else min(least, max(peaks))
    raise PlanError(
        f"no grid of {len(found[0].layout.grid)} ranks holds the network within {format_bytes(limit)}; it takes "
        f"{format_bytes(least)} on every rank; ask for that much, or for more ranks"
    )


def _grids(count: int, network: RegionNetwork) -> Iterator[tuple[int, ...]]:
    """Every arrangement over the axes whose parts are not smaller than a few pixels."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    pixels = network.shapes[network.inputs[0]][2:] if network.inputs else ()
    for counts in itertools.product(divisors, repeat=network.rank):
        if math.prod(counts) == count and all(n >= 4 * c for n, c in zip(pixels, counts, strict=False)):
            yield counts


def _image(network: RegionNetwork) -> str:
    return "x".join(str(n) for n in network.shapes[network.inputs[0]][2:]) if network.inputs else "no pixels"


def _choice(network: RegionNetwork, counts: tuple[int, ...], costs: Costs, link: Link) -> _Choice:
    """One grid, with all halos exchanged."""
    grid, extent = PartGrid(counts), split_extent(network, counts)
    if not extent.calls:
        where, why = next(iter(extent.stopped), ("the model", "no input is an image"))
        raise PlanError(f"nothing of {network.graph.root.type} can be split: {where} comes first, and {why}")
    layout = lay_out(network, extent, grid, whole_on=_whole_on(network, extent.calls, len(grid)))
    return _Choice(layout, (), split_forecast(layout, costs, link))


def _whole_on(network: RegionNetwork, calls: frozenset[str], count: int) -> range:
    """The ranks on which what follows the split part runs."""
    rest = set(network.graph.calls) - calls
    return range(count if rest and not _has_own_stage(network, rest) else 1)


def _with_overlap(best: _Choice, costs: Costs, link: Link) -> _Choice:
    """The same grid, with those halos computed twice that are cheaper so."""
    network, extent, grid = best.layout.network, best.layout.extent, best.layout.grid
    whole_on = _whole_on(network, extent.calls, len(grid))
    for value in list(best.layout.exchanges)[:_TRIED]:
        twice = (*best.twice, value)
        layout = lay_out(network, extent, grid, twice=twice, whole_on=whole_on)
        other = _Choice(layout, twice, split_forecast(layout, costs, link))
        if other.forecast.time_s < best.forecast.time_s:
            best = other
    return best


def _peaks(layout: SplitLayout) -> tuple[int, ...]:
    model = layout.network.model
    state = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    known: dict[object, int] = {}
    found = []
    for rank, regions in enumerate(layout.ranks):
        key = (rank == 0, tuple(sorted((v, sizes(r)) for v, r in regions.made.items())), str(regions.widened.keys()))
        if key not in known:
            known[key] = rank_bytes(layout, rank)
        found.append(state + known[key])
    return tuple(found)


def _has_own_stage(network: RegionNetwork, rest: set[str]) -> bool:
    """Whether what follows the split part has weights that only one rank need hold."""
    return any(network.graph.calls[c].parameters for c in rest)


def _plan(
    graph: Graph, choice: _Choice, peaks: tuple[int, ...], where: Machine, limit: int, others: list[_Choice]
) -> Plan:
    layout, forecast = choice.layout, choice.forecast
    stages: tuple[tuple[str, ...], ...] = (("",),)
    placement = None
    rest = [c for c in graph.calls if c not in layout.extent.calls]
    if _has_own_stage(layout.network, set(rest)):
        stages = name_stages(graph, [[c for c in graph.calls if c in layout.extent.calls], rest])
        placement = (0, 0)
    spatial: dict[str, object] = {"grid": list(layout.grid.counts)}
    if choice.twice:
        spatial["twice"] = list(choice.twice)
    waits = forecast.exchange_s + forecast.rest_s * (1 - 1 / len(layout.grid))
    bubble = min(1.0, waits / forecast.time_s) if forecast.time_s else 0.0
    why = [str(forecast)]
    why += [f"{block} needs the whole image ({reason})" for block, reason in layout.extent.stopped[:3]]
    why += [f"{c.layout.grid}: {format_time(c.forecast.time_s)}" for c in others[:4]]
    return Plan(
        graph.fingerprint,
        stages,
        placement=placement,
        exactness="reassociated",
        spatial=spatial,
        machine=where.fingerprint,
        memory_bytes=limit,
        predicted=PredictedStep(forecast.time_s, peaks, bubble, judge="grid"),
        why=tuple(why),
    )
