"""What a rank's own part takes, measured: the difference to its share of what the whole calls take.

A script (`outcore.spatial.script`) starts from the calls as they were measured on the whole image, of which a rank
computes a share. A part costs something else: Python between calls and around messages, norms that are put together
from sums over ranks, kernels that do not shrink with the image (those of a wide layer read all of its weights for any
number of pixels), and at times less, where a part fits a cache that the whole does not. None of that depends on other
ranks, so one rank measures it alone: it runs its part forward and backward with neighbours that answer at once with
zeros (`SilentRanks`). What it took beyond its share is added to the script of every layout of that network.

Forward is timed node by node, on a GPU by the device's own clock: a host that waits for the device after every node
would add a launch to each; on a CPU, where one thread computes, by that thread's own, which does not run while another
process has the core. Backward is autograd's, and is timed as a whole; what it took beyond its share is laid on
nodes as forward's excess is. What messages take on top is the link's (`Link.host_s`).

A halo that is computed on both sides, instead of exchanged, costs more than its pixels: who reads the value takes a
part of it, and its gradient has to be put back. So two more layouts are measured, in which every second halo is
computed twice, first the even ones, then the odd; what nodes that make or read such a value take there counts wherever
a layout does so. Of a plan that is chosen from that, the part can be measured as it is laid out there: what is then
predicted of that plan holds no guess about its layout.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from outcore.cost.costs import Costs
from outcore.errors import PlanError
from outcore.job import Job
from outcore.machine import Machine
from outcore.ops.region import elements
from outcore.planner.pipeline.call_weights import CallWeight, CallWeights
from outcore.planner.pipeline.plan_job import weights_on
from outcore.spatial.execute import SplitRun, SplitState
from outcore.spatial.extent import split_extent
from outcore.spatial.forecast import SilentRanks
from outcore.spatial.layout import SplitLayout, lay_out
from outcore.spatial.parts import PartGrid, shape_of
from outcore.spatial.stage_layout import layout_of_stage
from outcore.stream.network import RegionNetwork, RegionNode

__all__ = ["PartCosts", "measure_part"]

_SKIPPED = 2


@dataclass(frozen=True)
class PartCosts:
    """What parts take on a rank beyond their share of the whole, by the value that a node makes; in seconds."""

    forward_s: Mapping[str, float] = field(default_factory=dict)
    backward_s: Mapping[str, float] = field(default_factory=dict)
    exchange_s: tuple[float, float] = (0.0, 0.0)
    """Of an exchange beside its messages, and of a border that is computed ahead beside its pixels; forward and
    backward."""
    overlap_forward_s: Mapping[str, float] = field(default_factory=dict)
    """The same for nodes that make or read a value whose halo is computed on both sides."""
    overlap_backward_s: Mapping[str, float] = field(default_factory=dict)

    def of(self, value: str, *, backward: bool, overlaps: bool = False) -> float:
        """That of one node, one way."""
        usual = (self.backward_s if backward else self.forward_s).get(value, 0.0)
        if not overlaps:
            return usual
        return (self.overlap_backward_s if backward else self.overlap_forward_s).get(value, usual)


_Moment = Any  # seconds of a clock of the host, or an event of a GPU


class _TimedRun(SplitRun):
    """A forward that notes when each node and each exchange begins and ends."""

    nodes: dict[str, tuple[_Moment, _Moment]]
    borders: dict[str, tuple[_Moment, _Moment]]
    """Of nodes whose borders are computed ahead."""
    exchanges: list[tuple[_Moment, _Moment]]

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The same values."""
        self.nodes, self.borders, self.exchanges = {}, {}, []
        return super().run(inputs)

    def _node(self, node: RegionNode) -> None:
        began = _mark(self.state.device)
        super()._node(node)
        self.nodes[node.output] = began, _mark(self.state.device)

    def _post_borders(self, node: RegionNode) -> None:
        began = _mark(self.state.device)
        super()._post_borders(node)
        self.borders[node.output] = began, _mark(self.state.device)

    def _post(self, node: RegionNode) -> None:
        began = _mark(self.state.device)
        super()._post(node)
        self.exchanges.append((began, _mark(self.state.device)))

    def _complete(self, value: str) -> None:
        began = _mark(self.state.device)
        super()._complete(value)
        self.exchanges.append((began, _mark(self.state.device)))


def measure_part(
    job: Job,
    grid: tuple[int, ...],
    *,
    costs: Costs,
    machine: Machine,
    batch: int | None = None,
    device: torch.device | str = "cpu",
    steps: int = 7,
    spatial: Mapping[str, Any] | None = None,
) -> PartCosts:
    """Run the first rank's part of a network a few times on a device, with silent neighbours.

    It needs the memory of one part. Where ranks share memory and caches, measure in as many processes at the same time
    as there will be ranks.

    Args:
        job: the network.
        grid: ranks along each pixel axis.
        costs: of its calls on the whole image.
        machine: on which the costs hold.
        batch: samples; the job's own if not given.
        device: where to run.
        steps: how often, of which the first two do not count.
        spatial: a plan's, to measure the part as it is laid out there, for a prediction of that plan.
    """
    return PartProbe(job, grid, costs=costs, machine=machine, batch=batch, device=device, spatial=spatial).measure(
        steps
    )


class PartProbe:
    """The first rank's part of a network, ready to be measured, once or now and then; takes what `measure_part`
    does."""

    def __init__(
        self,
        job: Job,
        grid: tuple[int, ...],
        *,
        costs: Costs,
        machine: Machine,
        batch: int | None = None,
        device: torch.device | str = "cpu",
        spatial: Mapping[str, Any] | None = None,
    ) -> None:
        graph = job.capture(batch)
        network = RegionNetwork(graph)
        counts = shape_of(tuple(grid), network.rank)
        extent = split_extent(network, counts)
        if not extent.calls:
            raise PlanError(f"nothing of {graph.root.type} can be split, so there is no part to measure")
        self._part = _Part(job, network, batch, torch.device(device))
        self._weights = weights_on(machine, graph, costs)
        self._overlapped: list[SplitLayout] = []
        if spatial is not None:
            self._layout = layout_of_stage(graph, frozenset(graph.calls), {**spatial, "grid": grid}, network)
            return
        self._layout = lay_out(network, extent, PartGrid(counts), whole_on=())
        for half in (list(self._layout.exchanges)[::2], list(self._layout.exchanges)[1::2]):
            if half:
                self._overlapped.append(lay_out(network, extent, PartGrid(counts), twice=half, whole_on=()))

    def measure(self, steps: int = 7) -> PartCosts:
        """What it takes now, from so many steps, of which the first two do not count."""
        found = _beyond_the_share(self._part.measure(self._layout, steps), self._weights)
        for layout in self._overlapped:
            found = _with_overlaps(found, self._part.measure(layout, steps), self._weights)
        return found


@dataclass(frozen=True)
class _PartTimes:
    """Seconds that a rank's part took in a layout."""

    layout: SplitLayout
    forward: Mapping[str, float]
    """Of every node."""
    exchanges_s: float
    """Of all exchanges, forward."""
    back_s: float
    """Of the whole backward."""


class _Part:
    """The first rank's part of a network on a device, with silent neighbours."""

    def __init__(self, job: Job, network: RegionNetwork, batch: int | None, device: torch.device) -> None:
        self.network, self.device = network, device
        self.model = job.model().to(device).train()
        given = job.made_batch(batch)[0]
        tensors = given if isinstance(given, (tuple, list)) else (given,)
        self.inputs = {name: t.to(device) for name, t in zip(network.graph.inputs, tensors, strict=True)}
        self.constants = {name: t.to(device) for name, t in network.recording.constants.items()}
        self.calls = {s.name: s for s in network.recording.steps}

    def measure(self, layout: SplitLayout, steps: int) -> _PartTimes:
        """Medians of some steps, of which the first two do not count."""
        rows = [self._step(layout) for _ in range(steps)][_SKIPPED:]
        forward = {name: statistics.median(row.forward[name] for row in rows) for name in rows[0].forward}
        # In most steps something takes longer than usual, each time something else: medians of nodes leave that out.
        whole_s = statistics.median(sum(row.forward.values()) for row in rows)
        times = whole_s / (sum(forward.values()) or 1.0)
        return _PartTimes(
            layout,
            {name: times * seconds for name, seconds in forward.items()},
            statistics.median(row.exchanges_s for row in rows),
            statistics.median(row.back_s for row in rows),
        )

    def _step(self, layout: SplitLayout) -> _PartTimes:
        comm, ambient = SilentRanks(0, len(layout.grid)), self.network.recording.ambient
        state = SplitState(comm, self.device, self.model, self.constants, self.calls, ambient)
        run = _TimedRun(layout, state)
        made = [t for t in run.run(self.inputs).values() if t.requires_grad]
        gradients = [torch.zeros_like(t) for t in made]
        began = _mark(self.device)
        torch.autograd.backward(made, gradients)
        back_s = _between_s(began, _mark(self.device))
        for parameter in self.model.parameters():
            parameter.grad = None
        forward = {name: _between_s(*moments) for name, moments in run.nodes.items()}
        for name, moments in run.borders.items():
            forward[name] += _between_s(*moments)
        return _PartTimes(layout, forward, sum(_between_s(*moments) for moments in run.exchanges), back_s)


def _beyond_the_share(took: _PartTimes, weights: CallWeights) -> PartCosts:
    """What was measured less the share of what the whole takes, node by node."""
    layout, exchanges_s = took.layout, took.exchanges_s
    ways = [_shares_s(layout, weights, lambda c: c.forward_s), _shares_s(layout, weights, lambda c: c.backward_s)]
    of_exchange = exchanges_s / max(1, len(layout.exchanges))
    strips_s = {name: of_exchange * len(strips[0]) for name, strips in layout.borders.items()}
    excess = {
        name: seconds - ways[0].get(name, 0.0) - strips_s.get(name, 0.0) for name, seconds in took.forward.items()
    }
    # Backward's own excess: as much for every exchange as forward's, the rest where forward has it.
    left = took.back_s - sum(ways[1].values()) - exchanges_s - sum(strips_s.values())
    fixed = {name: max(0.0, seconds) for name, seconds in excess.items()} if left > 0 else ways[1]
    total = sum(fixed.values()) or 1.0
    back = {name: left * part / total for name, part in fixed.items()}
    return PartCosts(excess, back, (of_exchange, of_exchange))


def _with_overlaps(found: PartCosts, took: _PartTimes, weights: CallWeights) -> PartCosts:
    """The same with what nodes take that make or read a value whose halo is computed on both sides: forward as
    measured, backward an equal part of what the whole took beyond what is known."""
    layout = took.layout
    nodes = [node.output for node in layout.extent.nodes if layout.overlaps(node)]
    shares = _shares_s(layout, weights, lambda c: c.forward_s)
    known_s = sum(_shares_s(layout, weights, lambda c: c.backward_s).values()) + sum(found.backward_s.values())
    left = took.back_s - known_s - found.exchange_s[1] * len(layout.exchanges)
    forward = {name: took.forward[name] - shares.get(name, 0.0) for name in nodes}
    backward = {name: found.of(name, backward=True) + left / len(nodes) for name in nodes}
    return replace(
        found,
        overlap_forward_s={**found.overlap_forward_s, **forward},
        overlap_backward_s={**found.overlap_backward_s, **backward},
    )


def _shares_s(layout: SplitLayout, weights: CallWeights, way: Callable[[CallWeight], float]) -> dict[str, float]:
    """The first rank's share of what each node takes on the whole image, with the borders that are computed ahead; that
    of a norm is in its last node."""
    found = {}
    for node in layout.extent.nodes:
        if node.norm is None:
            outputs = max(1, len(layout.network.graph.calls[node.call].outputs))
            found[node.output] = layout.shares(node)[0] * way(weights.calls[node.call]) / outputs
        if node.output in layout.borders:
            strips, whole = layout.borders[node.output][0], max(1, math.prod(node.shape))
            found[node.output] += sum(map(elements, strips)) / whole * way(weights.calls[node.call])
    return found


def _mark(device: torch.device) -> _Moment:
    if device.type != "cuda":
        return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between_s(began: _Moment, ended: _Moment) -> float:
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) * 1e-3
