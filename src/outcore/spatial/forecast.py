"""What a grid takes: bytes on every rank, seconds of a step, and what is sent.

Bytes are counted by running a rank's forward and backward on fake tensors, which have sizes but no content, with
neighbours that answer at once (`SilentRanks`): the code that is counted is the code that runs. Seconds are the costs of
the calls on the whole image times the largest share that a rank computes of each, halos included, plus what messages
take that nothing hides: an exchange is in flight while statistics of the same value are taken, all others are waited
for.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from outcore.cost.costs import Costs
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.graph.subgraph import Subgraph
from outcore.machine.link import Link
from outcore.machine.units import format_bytes, format_time
from outcore.ops.region import elements
from outcore.spatial.communicator import IncomingPart
from outcore.spatial.execute import SplitRun, SplitState
from outcore.spatial.layout import SplitLayout
from outcore.stream.arguments import device_of

__all__ = ["SplitForecast", "rank_bytes", "split_forecast"]


@dataclass(frozen=True)
class SplitForecast:
    """What a step on a grid is expected to take."""

    compute_s: float
    """Forward and backward of the split part, by the slowest rank at every call."""
    rest_s: float
    """Of what follows the split part, on one rank."""
    exchange_s: float
    """Messages that are waited for."""
    sent_bytes: tuple[int, ...]
    """By rank, in a step."""
    exchanges: int
    sums: int
    """Statistics and pools that all ranks add up."""

    @property
    def time_s(self) -> float:
        """Seconds of a step, without the update."""
        return self.compute_s + self.rest_s + self.exchange_s

    def __str__(self) -> str:
        sent, computing = format_bytes(max(self.sent_bytes)), format_time(self.compute_s + self.rest_s)
        return (
            f"{self.exchanges} halo exchanges and {self.sums} sums over all ranks, {sent} sent by a rank in a step; "
            f"computing {computing}, waiting for messages {format_time(self.exchange_s)}"
        )


class SilentRanks:
    """Ranks that are not there: what they send has sizes and no content."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def send(self, tensor: torch.Tensor, target: int, number: int) -> None:
        """Copy, as a real send does, and forget."""
        tensor.detach().clone(memory_format=torch.contiguous_format)

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, source: int, number: int
    ) -> IncomingPart:
        """Something of that size."""
        return _Unknown(shape, dtype, device)


@dataclass(frozen=True)
class _Unknown:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def wait(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def rank_bytes(layout: SplitLayout, rank: int) -> int:
    """The most that one rank holds in forward and backward: values, what autograd saves, gradients of parameters; on
    the first rank also what follows the split part. Parameters and the image itself are not counted."""
    network = layout.network
    device = device_of(network.model)
    calls = {s.name: s for s in network.recording.steps}
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        with FakeCopyMode(fake):
            model = copy.deepcopy(network.model)
        inputs = {
            name: torch.empty(network.shapes[name], dtype=network.dtypes[name], device=device)
            for name in network.graph.inputs
        }
        constants = {n: fake.from_tensor(t) for n, t in network.recording.constants.items()}
        ranks = SilentRanks(rank, len(layout.grid))
        given = SplitState(ranks, device, model, constants, calls, network.recording.ambient)
        known = [*inputs.values(), *model.parameters(), *model.buffers(), *constants.values()]
        with LiveBytes(known) as live, torch.enable_grad():
            _backward(SplitRun(layout, given), inputs, model, whole=rank == 0)
            return int(live.peak)


def _backward(run: SplitRun, inputs: Mapping[str, torch.Tensor], model: nn.Module, *, whole: bool) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    made = run.run(inputs)
    run.values.clear()
    graph, recording = run.network.graph, run.network.recording
    rest = set(graph.calls) - run.layout.extent.calls
    if whole and rest:
        tail = Subgraph(graph, model, recording, rest)
        given = {n: made[n] if n in made else inputs[n] for n in tail.inputs}
        left = {n: t for n, t in made.items() if n in graph.outputs}
        made.clear()
        made = left | tail(given)
        given.clear()
    roots = [t for t in made.values() if t.requires_grad]
    made.clear()
    gradients = [torch.zeros_like(t) for t in roots]
    if run.token is not None and run.token.requires_grad:
        roots.append(run.token)
        gradients.append(torch.zeros_like(run.token))
    if roots and trained:
        torch.autograd.grad(roots, trained, gradients, allow_unused=True)


def split_forecast(layout: SplitLayout, costs: Costs, link: Link) -> SplitForecast:
    """Seconds and messages of a step.

    Args:
        layout: of all ranks.
        costs: of the calls on the whole image.
        link: between two ranks.
    """
    network, nodes = layout.network, layout.extent.nodes
    compute_s = 0.0
    counted: set[str] = set()
    for node in nodes:
        regions = [r.made.get(node.output) for r in layout.ranks] if node.kind == "local" else [None]
        largest = max((elements(r) for r in regions if r is not None), default=0)
        share = min(1.0, largest / max(1, math.prod(node.shape))) if node.kind == "local" else 1.0
        if node.norm is not None or (node.call in counted and node.kind == "global"):
            continue  # statistics are in the cost of the norm's call
        counted.add(node.call)
        outputs = max(1, len(network.graph.calls[node.call].outputs))
        compute_s += share * _call_s(costs, node.call) / outputs
    rest_s = sum(_call_s(costs, c) for c in network.graph.calls if c not in layout.extent.calls)
    count = len(layout.grid)
    sent, waited_s = [0] * count, 0.0
    hidden = {n.values[0] for n in nodes if n.norm is not None}
    for exchange in (*layout.exchanges.values(), *layout.gathers.values()):
        size = network.dtypes[exchange.value].itemsize
        most = max(exchange.elements(rank) for rank in range(count)) * size
        for rank in range(count):
            sent[rank] += 2 * exchange.elements(rank) * size
        if most:
            seconds = link.time_s(most)
            waited_s += seconds if exchange.value in hidden else 2 * seconds
    sums = [n for n in nodes if n.kind == "reduction"]
    for node in sums:
        row = 2 * math.prod(node.shape) * node.dtype.itemsize * (count - 1)
        for rank in range(count):
            sent[rank] += row
        waited_s += 2 * link.time_s(row / 2) if count > 1 else 0.0
    return SplitForecast(compute_s, rest_s, waited_s, tuple(sent), len(layout.exchanges), len(sums))


def _call_s(costs: Costs, call: str) -> float:
    cost = costs[call]
    forward = cost.forward.median_s if cost.forward is not None else 0.0
    return forward + (cost.backward.median_s if cost.backward is not None else 0.0)
