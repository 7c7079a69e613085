"""What a rank's own part takes, measured: the difference to its share of what the whole calls take.

A script (`outcore.spatial.script`) starts from the calls as they were measured on the whole image, of which a rank
computes a share. A part costs something else: Python between calls and around messages, norms that are put together
from sums over ranks, kernels that do not shrink with the image (those of a wide layer read all of its weights for any
number of pixels), and at times less, where a part fits a cache that the whole does not. None of that depends on other
ranks, so one rank measures it alone: it runs its part forward and backward with neighbours that answer at once with
zeros (`SilentRanks`). What it took beyond its share is added to the script of every layout of that network.

Forward is timed node by node. Backward is autograd's, and is timed as a whole; what it took beyond its share is laid on
nodes as forward's excess is. What messages take on top is the link's (`Link.host_s`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from outcore.cost.costs import Costs
from outcore.errors import PlanError
from outcore.job import Job
from outcore.machine import Machine
from outcore.planner.pipeline.call_weights import CallWeight, CallWeights
from outcore.planner.pipeline.plan_job import weights_on
from outcore.spatial.execute import SplitRun, SplitState
from outcore.spatial.extent import split_extent
from outcore.spatial.forecast import SilentRanks
from outcore.spatial.layout import SplitLayout, lay_out
from outcore.spatial.parts import PartGrid, shape_of
from outcore.stream.network import RegionNetwork, RegionNode

__all__ = ["PartCosts", "measure_part"]

_SKIPPED = 2


@dataclass(frozen=True)
class PartCosts:
    """What parts take on a rank beyond their share of the whole, by the value that a node makes; in seconds."""

    forward_s: Mapping[str, float] = field(default_factory=dict)
    backward_s: Mapping[str, float] = field(default_factory=dict)
    exchange_s: tuple[float, float] = (0.0, 0.0)
    """Of an exchange beside its messages, forward and backward."""

    def of(self, value: str, *, backward: bool) -> float:
        """That of one node, one way."""
        return (self.backward_s if backward else self.forward_s).get(value, 0.0)


class _TimedRun(SplitRun):
    """A forward that notes what each node and each exchange takes."""

    times: dict[str, float]
    exchanges_s: float

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The same values."""
        self.times, self.exchanges_s = {}, 0.0
        return super().run(inputs)

    def _node(self, node: RegionNode) -> None:
        began = _now(self.state.device)
        super()._node(node)
        self.times[node.output] = _now(self.state.device) - began

    def _post(self, node: RegionNode) -> None:
        began = _now(self.state.device)
        super()._post(node)
        self.exchanges_s += _now(self.state.device) - began

    def _complete(self, value: str) -> None:
        began = _now(self.state.device)
        super()._complete(value)
        self.exchanges_s += _now(self.state.device) - began


def measure_part(
    job: Job,
    grid: tuple[int, ...],
    *,
    costs: Costs,
    machine: Machine,
    batch: int | None = None,
    device: torch.device | str = "cpu",
    steps: int = 7,
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
    """
    graph = job.capture(batch)
    network = RegionNetwork(graph)
    counts = shape_of(tuple(grid), network.rank)
    extent = split_extent(network, counts)
    if not extent.calls:
        raise PlanError(f"nothing of {graph.root.type} can be split, so there is no part to measure")
    layout = lay_out(network, extent, PartGrid(counts), whole_on=())
    weights = weights_on(machine, graph, costs)
    where = torch.device(device)
    model = job.model().to(where).train()
    given = job.made_batch(batch)[0]
    tensors = given if isinstance(given, (tuple, list)) else (given,)
    inputs = {name: t.to(where) for name, t in zip(graph.inputs, tensors, strict=True)}
    constants = {name: t.to(where) for name, t in network.recording.constants.items()}
    calls = {s.name: s for s in network.recording.steps}

    def one() -> tuple[dict[str, float], float, float]:
        comm = SilentRanks(0, len(layout.grid))
        run = _TimedRun(layout, SplitState(comm, where, model, constants, calls, network.recording.ambient))
        made = [t for t in run.run(inputs).values() if t.requires_grad]
        gradients = [torch.zeros_like(t) for t in made]
        began = _now(where)
        torch.autograd.backward(made, gradients)
        back_s = _now(where) - began
        for parameter in model.parameters():
            parameter.grad = None
        return run.times, run.exchanges_s, back_s

    rows = [one() for _ in range(steps)][_SKIPPED:]
    forward = {name: statistics.median(row[0][name] for row in rows) for name in rows[0][0]}
    exchanges_s, back_s = statistics.median(row[1] for row in rows), statistics.median(row[2] for row in rows)
    return _beyond_the_share(layout, weights, forward, exchanges_s, back_s)


def _beyond_the_share(
    layout: SplitLayout, weights: CallWeights, forward: Mapping[str, float], exchanges_s: float, back_s: float
) -> PartCosts:
    """What was measured less the share of what the whole takes, node by node."""
    ways = [_shares_s(layout, weights, lambda c: c.forward_s), _shares_s(layout, weights, lambda c: c.backward_s)]
    excess = {name: seconds - ways[0].get(name, 0.0) for name, seconds in forward.items()}
    of_exchange = exchanges_s / max(1, len(layout.exchanges))
    # Backward's own excess: as much for every exchange as forward's, the rest where forward has it.
    left = back_s - sum(ways[1].values()) - exchanges_s
    fixed = {name: max(0.0, seconds) for name, seconds in excess.items()} if left > 0 else ways[1]
    total = sum(fixed.values()) or 1.0
    back = {name: left * part / total for name, part in fixed.items()}
    return PartCosts(excess, back, (of_exchange, of_exchange))


def _shares_s(layout: SplitLayout, weights: CallWeights, way: Callable[[CallWeight], float]) -> dict[str, float]:
    """The first rank's share of what each node takes on the whole image; that of a norm is in its last node."""
    found = {}
    for node in layout.extent.nodes:
        if node.norm is None:
            outputs = max(1, len(layout.network.graph.calls[node.call].outputs))
            found[node.output] = layout.shares(node)[0] * way(weights.calls[node.call]) / outputs
    return found


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
