"""Which grid: from a job and a number of ranks to a plan whose first stage shares the image.

Every way to arrange the ranks over the axes is laid out, and its forward and backward are simulated; the fastest whose
bytes fit is taken. For each grid there is one more choice, exchange by exchange in their order, by what makes the step
faster: a halo that costs more to wait for than to compute is computed on both sides of the cut (``twice``), and borders
are computed ahead of the rest (``early``), so that they travel while it is computed. What stands in the plan is the
timeline of the whole step, reductions and update included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from outcore.cost.costs import Costs
from outcore.cost.fixed_times import batch_costs
from outcore.errors import OutcoreError, PlanError
from outcore.graph import Graph
from outcore.job import Job
from outcore.machine import Machine, known, parse
from outcore.machine.units import format_bytes, format_time, parse_bytes
from outcore.planner.pipeline.call_weights import CallWeights
from outcore.planner.pipeline.loss_and_update import LossAndUpdate
from outcore.planner.pipeline.plan_job import links_of, weights_on
from outcore.program import Links
from outcore.program.plan.document import Plan, PredictedStep
from outcore.program.plan.stage_names import name_stages
from outcore.program.simulator.part_time import PartBytes, PartScript, SplitStageCosts
from outcore.spatial.extent import SplitExtent, is_one_map, split_extent
from outcore.spatial.forecast import SplitForecast, bytes_of_ranks, split_forecast
from outcore.spatial.layout import SplitLayout, lay_out
from outcore.spatial.part_costs import PartCosts
from outcore.spatial.parts import PartGrid, shape_of
from outcore.spatial.script import part_scripts, step_s
from outcore.spatial.timeline import grid_timeline
from outcore.stream.execute.pixel_loss import PixelLoss, pixel_loss_of
from outcore.stream.network import RegionNetwork

__all__ = ["GridChoice", "GridSearch", "is_over_pixels", "plan_grid"]

_TRIED = 48
"""Exchanges that are tried to be computed twice, or early."""
_FASTER = 0.9999
"""An exchange is given up for less time than this; predictions of the same time differ in the last digits."""


@dataclass(frozen=True)
class GridChoice:
    """A grid, what is computed twice or early on it, and what a forward and a backward take."""

    layout: SplitLayout
    twice: tuple[str, ...]
    early: tuple[str, ...]
    fraction: float
    """The part of the recorded batch that the times are for."""
    scripts: tuple[PartScript, PartScript]
    forecast: SplitForecast

    @property
    def time_s(self) -> float:
        """Of the first stage."""
        return self.forecast.time_s


class GridSearch:
    """Lays out and times grids of one network on one machine."""

    def __init__(
        self,
        graph: Graph,
        weights: CallWeights,
        links: Links,
        *,
        over_pixels: bool = False,
        parts: PartCosts | None = None,
    ) -> None:
        self.graph, self.weights, self.links, self.over_pixels = graph, weights, links, over_pixels
        self.parts = parts
        self.network = RegionNetwork(graph)
        self._memory: dict[int, tuple[SplitLayout, tuple[PartBytes, ...]]] = {}

    def grids(self, count: int) -> Iterator[tuple[int, ...]]:
        """Every arrangement of so many ranks over the axes whose parts are not smaller than a few pixels."""
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        pixels = self.network.shapes[self.network.inputs[0]][2:] if self.network.inputs else ()
        for counts in itertools.product(divisors, repeat=self.network.rank):
            if math.prod(counts) == count and all(n >= 4 * c for n, c in zip(pixels, counts, strict=False)):
                yield counts

    def choice(self, counts: tuple[int, ...], fraction: float = 1.0) -> GridChoice:
        """One grid, with all halos exchanged, for a part of the batch; raises where nothing can be split."""
        grid, extent = PartGrid(counts), split_extent(self.network, counts)
        if not extent.calls:
            where, why = next(iter(extent.stopped), ("the model", "no input is an image"))
            raise PlanError(f"nothing of {self.graph.root.type} can be split: {where} comes first, and {why}")
        whole_on = self._whole_on(extent, len(grid))
        return self._timed(lay_out(self.network, extent, grid, whole_on=whole_on), (), (), fraction)

    def _timed(
        self, layout: SplitLayout, twice: tuple[str, ...], early: tuple[str, ...], fraction: float
    ) -> GridChoice:
        first, _ = self._stages(layout.extent.calls)
        scripts = part_scripts(layout, self.weights, first, fraction, self.parts)
        took = step_s(scripts, self.links, len(layout.grid))
        return GridChoice(layout, twice, early, fraction, scripts, split_forecast(layout, *took))

    def _stages(self, split: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        """The calls of the first stage, and those of a second one: what needs the whole image is a stage of its own
        where it has weights, which only one rank need hold."""
        rest = frozenset(self.graph.calls) - split
        owned = any(self.graph.calls[c].parameters for c in rest)
        return (split, rest) if owned else (split | rest, frozenset())

    def _in_parts(self, extent: SplitExtent) -> bool:
        """Whether each rank takes the loss of its part."""
        return self.over_pixels and is_one_map(self.network, extent)

    def _whole_on(self, extent: SplitExtent, count: int) -> range:
        """The ranks on which what follows the split part runs: all, where it is in the first stage; none, where the
        loss is taken in parts."""
        if self._in_parts(extent):
            return range(0)
        return range(count if self._stages(extent.calls)[0] - extent.calls else 1)

    def improved(self, best: GridChoice) -> GridChoice:
        """The same grid, with those halos computed twice, or their borders early, that are cheaper so."""
        given = best.layout
        whole_on = self._whole_on(given.extent, len(given.grid))
        for value in list(given.exchanges)[:_TRIED]:
            for twice, early in (((*best.twice, value), best.early), (best.twice, (*best.early, value))):
                if value in best.twice:
                    continue
                layout = lay_out(self.network, given.extent, given.grid, twice=twice, early=early, whole_on=whole_on)
                other = self._timed(layout, twice, early, best.fraction)
                best = other if other.time_s < _FASTER * best.time_s else best
        return best

    def memory(self, choice: GridChoice) -> tuple[PartBytes, ...]:
        """What every rank holds."""
        key = id(choice.layout)
        if key not in self._memory:
            found = bytes_of_ranks(choice.layout, self._stages(choice.layout.extent.calls)[0])
            self._memory[key] = choice.layout, found
        return self._memory[key][1]

    def plan(self, choice: GridChoice, *, replicas: int = 1, batches: int = 1) -> Plan:
        """The plan of a grid, with its figures."""
        layout = choice.layout
        stages: tuple[tuple[str, ...], ...] = (("",),)
        placement = None
        split, rest = self._stages(layout.extent.calls)
        if rest:
            order = self.graph.calls
            stages = name_stages(self.graph, [[c for c in order if c in split], [c for c in order if c in rest]])
            placement = (0, 0)
        spatial: dict[str, object] = {"grid": list(layout.grid.counts)}
        if choice.twice:
            spatial["twice"] = list(choice.twice)
        if choice.early:
            spatial["early"] = list(choice.early)
        if self._in_parts(layout.extent):
            spatial["loss"] = "parts"
        made = Plan(
            self.graph.fingerprint,
            stages,
            "model_parallel" if batches > 1 else "gpipe",
            batches=batches,
            replicas=replicas,
            placement=placement,
            exactness="reassociated",
            spatial=spatial,
            why=(str(choice.forecast), *self._stopped(layout)),
        )
        fraction = 1 / (replicas * batches)
        scripts = choice.scripts
        if fraction != choice.fraction:
            scripts = part_scripts(layout, self.weights, split, fraction, self.parts)
        costs = SplitStageCosts(*scripts, tuple(part.scaled(fraction) for part in self.memory(choice)))
        timeline = grid_timeline(made, self.graph, self.weights, self.links, costs)
        peaks = timeline.peak_bytes[: made.ranks_per_replica]
        return replace(made, predicted=PredictedStep(timeline.step_s, peaks, timeline.bubble, "simulated"))

    def _stopped(self, layout: SplitLayout) -> list[str]:
        return [f"{block} needs the whole image ({reason})" for block, reason in layout.extent.stopped[:3]]


def plan_grid(
    source: Job | Graph,
    grid: Sequence[int] | None = None,
    *,
    devices: int | None = None,
    memory: str | int | None = None,
    machine: str | Machine | None = None,
    batch: int | None = None,
    costs: Costs | None = None,
    beside: LossAndUpdate | None = None,
    over_pixels: bool | None = None,
    parts: PartCosts | None = None,
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
        beside: the loss and the update of a graph's step; those of a job are found.
        over_pixels: whether the loss is a sum or mean over the pixels of the output, which each rank can take of its
            part; a job's loss is looked at if not given.
        parts: what a rank's part takes beyond its share (`measure_part`), where it was measured.

    Raises:
        PlanError: nothing of the network can be split, or no grid fits; says the least that would.
    """
    where = parse(machine) if isinstance(machine, str) else machine or known()
    graph = source.capture(batch) if isinstance(source, Job) else source
    limit = parse_bytes(memory) if isinstance(memory, str) else memory or where.devices[0].memory_bytes
    costs = costs if costs is not None else batch_costs(graph, where)
    if beside is None and isinstance(source, Job):
        beside = LossAndUpdate.of(source, graph, costs, where, batch)
    pixels = is_over_pixels(source, graph) if over_pixels is None else over_pixels
    weights = weights_on(where, graph, costs, beside)
    search = GridSearch(graph, weights, links_of(where), over_pixels=pixels, parts=parts)
    count = devices or where.ranks
    grids = [shape_of(tuple(grid), search.network.rank)] if grid is not None else list(search.grids(count))
    found = sorted(map(search.choice, grids), key=lambda c: c.time_s)
    if not found:
        raise PlanError(f"no grid of {count} ranks fits an image of {_image(search.network)}; take fewer ranks")
    least = 0
    for number, choice in enumerate(found):
        made = search.plan(search.improved(choice))
        assert made.predicted is not None
        most = max(made.predicted.peak_bytes)
        if most <= limit:
            others = found[:number] + found[number + 1 :]
            why = (*made.why, *(f"{c.layout.grid}: {format_time(c.time_s)}" for c in others[:4]))
            return replace(made, machine=where.fingerprint, memory_bytes=limit, why=why)
        least = most if not least else min(least, most)
    raise PlanError(
        f"no grid of {len(found[0].layout.grid)} ranks holds the network within {format_bytes(limit)}; it takes "
        f"{format_bytes(least)} on every rank; ask for that much, or for more ranks"
    )


def is_over_pixels(source: Job | Graph, graph: Graph) -> bool:
    """Whether the loss of a job is a sum or mean over the pixels of what the network returns."""
    if not isinstance(source, Job) or pixel_loss_of(source.loss) is None or len(graph.outputs) != 1:
        return False
    try:
        target = source.example(device="meta")[2]
    except (OutcoreError, NotImplementedError):
        return isinstance(source.loss, PixelLoss)
    if not isinstance(target, torch.Tensor):  # a source, or not known yet
        return isinstance(source.loss, PixelLoss)
    shape = graph.values[graph.outputs[0]].shape or ()
    return len(shape) > 2 and tuple(target.shape[-(len(shape) - 2) :]) == tuple(shape[2:])


def _image(network: RegionNetwork) -> str:
    return "x".join(str(n) for n in network.shapes[network.inputs[0]][2:]) if network.inputs else "no pixels"
