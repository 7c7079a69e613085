"""What a rank of a grid holds, counted, and what a step sends and waits for.

Bytes are counted by running a rank's forward and backward on fake tensors, which have sizes but no content, with
neighbours that answer at once (`SilentRanks`): the code that is counted is the code that runs. Seconds are those of the
simulated step (`outcore.spatial.script`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from outcore.cost.measured.live_bytes import LiveBytes
from outcore.graph.structure import device_of
from outcore.graph.subgraph import Subgraph
from outcore.machine.units import format_bytes, format_time
from outcore.ops.region import sizes
from outcore.program import Event
from outcore.program.simulator.part_time import PartBytes
from outcore.program.timeline import COMPUTE
from outcore.spatial.communicator import IncomingPart
from outcore.spatial.execute import SplitRun, SplitState
from outcore.spatial.layout import SplitLayout

__all__ = ["SplitForecast", "bytes_of_ranks", "split_forecast"]


@dataclass(frozen=True)
class SplitForecast:
    """What a step on a grid is expected to send and to wait for."""

    time_s: float
    """Of a forward and a backward."""
    waits_s: float
    """In which the rank that computes most does not compute."""
    sent_bytes: tuple[int, ...]
    """By rank, in a step."""
    exchanges: int
    sums: int
    """Statistics and pools that all ranks add up."""

    def __str__(self) -> str:
        sent, computing = format_bytes(max(self.sent_bytes)), format_time(self.time_s - self.waits_s)
        return (
            f"{self.exchanges} halo exchanges and {self.sums} sums over all ranks, {sent} sent by a rank in a step; "
            f"computing {computing}, waiting for messages {format_time(self.waits_s)}"
        )


def split_forecast(layout: SplitLayout, time_s: float, events: Collection[Event]) -> SplitForecast:
    """The figures of a simulated forward and backward."""
    count = len(layout.grid)
    sent, busy_s = [0] * count, [0.0] * count
    for event in events:
        if event.stream == "send":
            sent[event.rank] += event.bytes
        elif event.stream == COMPUTE:
            busy_s[event.rank] += event.end_s - event.start_s
    sums = sum(node.kind == "reduction" for node in layout.extent.nodes)
    return SplitForecast(time_s, time_s - max(busy_s), tuple(sent), len(layout.exchanges), sums)


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


def bytes_of_ranks(layout: SplitLayout, calls: Collection[str]) -> tuple[PartBytes, ...]:
    """What a stage of these calls takes on every rank; ranks that do the same are counted once.

    That is values, what autograd saves and gradients of parameters, and on the first rank also what follows the split
    part; parameters and the image itself are not counted.
    """
    known: dict[object, PartBytes] = {}
    found = []
    for rank, regions in enumerate(layout.ranks):
        key = (rank == 0, tuple(sorted((v, sizes(r)) for v, r in regions.made.items())), str(regions.widened.keys()))
        if key not in known:
            known[key] = _part_bytes(layout, rank, frozenset(calls))
        found.append(known[key])
    return tuple(found)


def _part_bytes(layout: SplitLayout, rank: int, calls_of_stage: frozenset[str]) -> PartBytes:
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
            rest = set(calls_of_stage) - layout.extent.calls if rank == 0 else set()
            return _backward(SplitRun(layout, given), inputs, model, rest, live)


def _backward(
    run: SplitRun, inputs: Mapping[str, torch.Tensor], model: nn.Module, rest: set[str], live: LiveBytes
) -> PartBytes:
    trained = [p for p in model.parameters() if p.requires_grad]
    made = run.run(inputs)
    run.values.clear()
    graph, recording = run.network.graph, run.network.recording
    if rest:
        tail = Subgraph(graph, model, recording, rest)
        given = {n: made[n] if n in made else inputs[n] for n in tail.inputs}
        left = {n: t for n, t in made.items() if n in graph.outputs}
        made.clear()
        made = left | tail(given)
        given.clear()
    roots = [t for t in made.values() if t.requires_grad]
    made.clear()
    held, forward_peak = live.live, live.peak
    gradients = [torch.zeros_like(t) for t in roots]
    if run.token is not None and run.token.requires_grad:
        roots.append(run.token)
        gradients.append(torch.zeros_like(run.token))
    if roots and trained:
        torch.autograd.grad(roots, trained, gradients, allow_unused=True)
    return PartBytes(int(held), int(forward_peak), int(live.peak))
