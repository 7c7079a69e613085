"""A model on parts, all ranks threads of this process.

What real ranks do, without processes: for tests, and to try a grid on one machine. Parameters are shared by the
threads, so their gradients add up as they would over ranks; every rank has buffers of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from outcore.graph import capture
from outcore.graph.record.recording import Ref, fill
from outcore.graph.structure import leaves
from outcore.graph.subgraph import Subgraph
from outcore.spatial.communicator import Communicator, ThreadRanks, run_on_threads
from outcore.spatial.exchange import new_token
from outcore.spatial.execute import SplitRun, SplitState
from outcore.spatial.extent import split_extent
from outcore.spatial.layout import SplitLayout, lay_out
from outcore.spatial.parts import PartGrid, shape_of
from outcore.spatial.tiles.run_tiles import run_tiles
from outcore.stream.network import RegionNetwork
from outcore.stream.plan.prepared import PreparedStream, divided

__all__ = ["VirtualRanks"]


class VirtualRanks:
    """A model split over the threads of a grid."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[torch.Tensor],
        grid: Sequence[int],
        *,
        cuts: tuple[tuple[float, ...], ...] = (),
        twice: Collection[str] = (),
        early: Collection[str] | None = (),
        tile: int | Sequence[int] | None = None,
    ) -> None:
        self.model = model
        self.graph = capture(model, tuple(args))
        self.network = RegionNetwork(self.graph)
        self.grid = PartGrid(shape_of(tuple(grid), self.network.rank), cuts)
        self.extent = split_extent(self.network, self.grid.counts)
        self.layout: SplitLayout = lay_out(self.network, self.extent, self.grid, twice=twice, early=early)
        self.recording = self.network.recording
        self.copies = [model, *(_with_own_buffers(model) for _ in range(len(self.grid) - 1))]
        self.prepared: list[PreparedStream] = []
        """By rank: its network in tiles, where each rank streams its part."""
        self.calls = self.extent.calls
        """Those that run on parts."""
        if tile is not None:
            networks = [RegionNetwork(capture(one, tuple(args))) for one in self.copies]
            self.prepared = [divided(network, tile=tile, statistics=True) for network in networks]
            self.calls = frozenset(self.prepared[0].streaming.calls)
        rest = set(self.graph.calls) - self.calls
        self.tail = Subgraph(self.graph, model, self.recording, rest) if rest else None
        self.ranks: ThreadRanks | None = None
        """The queues of the last run."""

    def step(self, args: Sequence[torch.Tensor], loss: Any) -> torch.Tensor:
        """Forward, loss on the first rank, backward on all; gradients add up in the parameters."""
        training = torch.is_grad_enabled()

        def one(comm: Communicator) -> Any:
            with torch.set_grad_enabled(training):
                return self._rank(comm, args, loss)

        found, self.ranks = run_on_threads(len(self.grid), one)
        made: torch.Tensor = found[0]
        return made

    def _rank(self, comm: Communicator, args: Sequence[torch.Tensor], loss: Any) -> torch.Tensor | None:
        steps = {s.name: s for s in self.recording.steps}
        inputs = dict(zip(self.graph.inputs, [t for _, t in leaves(tuple(args), torch.Tensor)], strict=True))
        state = SplitState(
            comm,
            args[0].device,
            self.copies[comm.rank],
            self.recording.constants,
            steps,
            self.recording.ambient,
        )
        if self.prepared:
            token = new_token(args[0].device) if torch.is_grad_enabled() else None
            prepared = self.prepared[comm.rank]
            made, token = run_tiles(prepared, self.grid, comm, inputs, args[0].device, token)
        else:
            run = SplitRun(self.layout, state)
            made, token = run.run(inputs), run.token
        value = None
        if comm.rank == 0:
            values = dict(inputs) | made
            if self.tail is not None:
                values |= self.tail({n: values[n] for n in self.tail.inputs})

            def look(ref: Ref) -> Any:
                if ref.kind == "value":
                    return values[ref.name]
                return state.constants[ref.name] if ref.kind == "constant" else self.model.get_parameter(ref.name)

            value = loss(fill(self.recording.result, look))
        if token is not None and torch.is_grad_enabled():
            roots, gradients = [token], [torch.zeros_like(token)]
            if value is not None and value.requires_grad:
                roots, gradients = [value, *roots], [torch.ones_like(value), *gradients]
            torch.autograd.backward(roots, gradients)
        return value.detach() if value is not None else None


def _with_own_buffers(model: nn.Module) -> nn.Module:
    """A copy with the same parameters and other buffers."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})
