"""A grid of ranks of which each streams its part of the image in tiles.

Where a rank's part is still too large it is computed tile by tile, as one device streams an image
(`outcore.stream`): every rank takes the tiles over its part and reads from the image what they need, halo included, so
nothing is exchanged between neighbours. What tiles add up is added up over ranks as well:

    forward    own tiles ── statistics of all ranks are merged, maps put together ──▶ next pass ... ──▶ the rest
    backward   gradient of the boundary, to every rank its part ──▶ own tiles again ── gradients of maps and
               statistics are summed over ranks ──▶ the pass before ...

Small nodes between passes run on every rank alike, and count for the gradients of their parameters on the first. What
follows the boundary runs on the first rank. A map that a later pass starts from is whole on every rank, the boundary
on the first; of images nothing but the tile at hand is held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outcore.graph import Graph
from outcore.graph.record.recording import Context, Recording
from outcore.ops.region import sizes
from outcore.spatial.communicator import Communicator, gather_rows
from outcore.spatial.exchange import Token
from outcore.spatial.parts import PartGrid
from outcore.spatial.tiles.tile_shares import TileShares
from outcore.stream.execute.boundary import tracked
from outcore.stream.execute.execution import Execution
from outcore.stream.execute.gradient_sums import GradientSums
from outcore.stream.execute.map_store import cut
from outcore.stream.execute.pixel_loss import PixelLoss, one_pass
from outcore.stream.execute.step_context import TileOptions
from outcore.stream.execute.tile_schedule import GlobalsStep, PassStep, TileSchedule, compile_tiles
from outcore.stream.network import RegionNetwork
from outcore.stream.plan.passes import TilePass
from outcore.stream.plan.prepared import PreparedStream, StreamMode
from outcore.stream.plan.script import emit
from outcore.stream.rules.reduce import Largest, Mean, Moments, wide
from outcore.stream.source import StreamedImage, image_of

__all__ = ["loss_of_tiles", "own_network", "run_tiles"]


def run_tiles(
    prepared: PreparedStream,
    grid: PartGrid,
    comm: Communicator,
    given: Mapping[str, Any],
    device: torch.device,
    token: Token | None,
    seed: int = 0,
) -> tuple[dict[str, torch.Tensor], Token | None]:
    """The boundary values, whole on the first rank, and the end of the chain of messages.

    Args:
        prepared: the network in passes and tiles, the same on every rank, with this rank's own parameters and buffers.
        grid: of the ranks.
        comm: this rank's end of it.
        given: the inputs by name; images may be sources.
        device: of this rank.
        token: the beginning of the chain; None without gradients.
        seed: of random layers, the same on every rank.
    """
    execution = _shared(prepared, StreamMode(token is not None, False, 0), given, device, seed)
    execution.share(comm, grid)
    if token is None:
        return execution.forward(), None
    inputs, parameters = tracked(execution, given)
    *made, token = _SharedBoundary.apply(execution, token, *inputs, *parameters)  # type: ignore[no-untyped-call]
    return dict(zip(prepared.streaming.boundary, made, strict=True)), token


def loss_of_tiles(
    prepared: PreparedStream,
    grid: PartGrid,
    comm: Communicator,
    given: Mapping[str, Any],
    device: torch.device,
    token: Token | None,
    loss: PixelLoss,
    target: StreamedImage,
    seed: int = 0,
) -> tuple[torch.Tensor, Token | None]:
    """This rank's term of a loss over the pixels of the one map that the network returns, and the end of the chain of
    messages. No map is put together: a tile is sent back as soon as it is computed.

    Args:
        prepared: as for `run_tiles`; all of the network is in tiles, which make one map.
        grid: of the ranks.
        comm: this rank's end of it.
        given: the inputs by name; images may be sources.
        device: of this rank.
        token: the beginning of the chain; None without gradients.
        loss: over pixels.
        target: of the whole image; a rank reads what its tiles need.
        seed: of random layers, the same on every rank.
    """
    execution = _shared(prepared, StreamMode(token is not None, True, 0), given, device, seed)
    execution.share(comm, grid)
    execution.at_once = True
    if token is None:
        return one_pass(execution, loss, target, gradients=False)[0], None
    inputs, parameters = tracked(execution, given)
    term, token = _SharedLoss.apply(execution, loss, target, token, *inputs, *parameters)  # type: ignore[no-untyped-call]
    return term, token


def _shared(
    prepared: PreparedStream, mode: StreamMode, given: Mapping[str, Any], device: torch.device, seed: int
) -> _SharedTiles:
    streamed = set(prepared.network.inputs)
    if mode not in prepared.scripts:
        prepared.scripts[mode] = emit(prepared, mode)
    schedule = compile_tiles(*prepared.scripts[mode], prepared.streaming, tuple(prepared.graph.calls))
    return _SharedTiles(
        prepared.network,
        prepared.streaming,
        prepared.kinds,
        schedule,
        {name: image_of(x) for name, x in given.items() if name in streamed},
        {name: x.to(device) for name, x in given.items() if name not in streamed and isinstance(x, torch.Tensor)},
        frozenset(name for name, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad),
        device,
        Context.current(sorted({"cpu", device.type})),
        seed,
        TileOptions(duplicates=False),
    )


def own_network(graph: Graph, model: nn.Module, recording: Recording) -> RegionNetwork:
    """The nodes of a graph with the modules, parameters and constants of one rank, where it was recorded with
    others."""
    network = RegionNetwork(graph)
    network.model, network.recording = model, recording
    targets = {step.name: step.target for step in recording.steps}
    for name, node in network.nodes.items():
        if node.norm is not None and node.norm.module is not None and node.call in targets:
            norm = replace(node.norm, module=model.get_submodule(targets[node.call]))
            network.nodes[name] = replace(node, norm=norm)
    return network


class _SharedTiles(Execution):
    """One rank's tiles of a step."""

    comm: Communicator
    shares: TileShares
    at_once = False
    """Whether tiles of the last pass are sent back as soon as they are computed."""

    def share(self, comm: Communicator, grid: PartGrid) -> None:
        """Take this rank's tiles of every pass, and leave the others to the other ranks."""
        self.comm, self._number = comm, 0
        self.shares = TileShares(self.network, self.streaming, self.kinds, grid)
        own = [set(tiles) for tiles in self.shares.tiles[comm.rank]]

        def mine(steps: tuple[GlobalsStep | PassStep, ...]) -> tuple[GlobalsStep | PassStep, ...]:
            return tuple(_restricted(step, own[step.index]) if isinstance(step, PassStep) else step for step in steps)

        given = self.schedule
        self.schedule = TileSchedule(mine(given.forward), mine(given.backward), given.on_host)

    def _next(self) -> int:
        """The number of the next message, the same on every rank."""
        self._number += 1
        return self._number

    # Forward

    def forward(self) -> dict[str, torch.Tensor]:
        """The boundary values; only the first rank has all of them, others have zeros without memory instead."""
        for step in self.schedule.forward:
            self.run_step(step)
        made = {}
        for name in self.streaming.boundary:
            whole = self.comm.rank == 0 or name in self.shares.read_later or not self.network.is_streamed(name)
            if whole and name in self.store.values:
                made[name] = self.store.here(name)
                continue
            self.store.values.pop(name, None)
            none = torch.zeros((), dtype=self.network.dtypes[name], device=self.device)
            made[name] = none.expand(self.network.shapes[name])
        return made

    def _blank(self, name: str) -> torch.Tensor:
        return torch.zeros(self.network.shapes[name], dtype=self.network.dtypes[name], device=self.device)

    def finish_pass(self, step: PassStep, sums: dict[str, Any]) -> None:
        """Merge what all ranks have added up, and put maps together."""
        stage = self.streaming.stages[step.index]
        merged = {node.output: self._merged(node.reduction, sums[node.output]) for node in stage.reductions}
        for name in stage.maps:
            self._put_together(step.index, name)
        super().finish_pass(step, merged)

    def _put_together(self, index: int, name: str) -> None:
        """Send this rank's region of a map to those who need it, and write theirs."""
        number, boxes = self._next(), [self.shares.made(index, name, rank) for rank in range(self.comm.size)]
        targets = self.shares.readers(name)
        shape, dtype = self.network.shapes[name], self.network.dtypes[name]
        own, coming = boxes[self.comm.rank], {}
        if self.comm.rank in targets:
            for rank, box in enumerate(boxes):
                if rank != self.comm.rank and box is not None:
                    coming[rank] = box, self.comm.receive(sizes(box), dtype, self.device, rank, number)
        for rank in targets:
            if rank != self.comm.rank and own is not None:
                self.comm.send(self.store.read(name, own), rank, number)
        for box, part in coming.values():
            self.store.write(name, shape, box, part.wait())

    def _merged(self, reduction: Any, state: Any) -> Any:
        """The state of a reduction over the tiles of all ranks, from this rank's."""
        if isinstance(reduction, Mean):
            shape = [1 if d in reduction.dims else n for d, n in enumerate(reduction.shape)]
            kept = shape if reduction.keepdim else [n for d, n in enumerate(shape) if d not in reduction.dims]
            none = torch.zeros(kept, dtype=wide(reduction.dtype), device=self.device)
            return self._summed(none if state is None else state)
        if isinstance(reduction, Moments):
            return self._merged_moments(reduction, state)
        assert isinstance(reduction, Largest)
        kept = [n for d, n in enumerate(reduction.shape) if d not in reduction.dims]
        if state is None:
            low = torch.full(kept, float("-inf"), dtype=reduction.dtype, device=self.device)
            none = torch.zeros(kept, dtype=torch.int64, device=self.device)
            state = low, none, none.unsqueeze(-1).expand(*kept, len(reduction.shape)) - 1
        columns = [gather_rows(self.comm, part.contiguous(), self._next()) for part in state]
        best = tuple(column[0] for column in columns)
        for rank in range(1, self.comm.size):
            more = columns[0][rank] > best[0]
            best = (
                torch.where(more, columns[0][rank], best[0]),
                torch.where(more, columns[1][rank], best[1]),
                torch.where(more.unsqueeze(-1), columns[2][rank], best[2]),
            )
        return best

    def _merged_moments(self, moments: Moments, state: Any) -> Any:
        shape = (1 if moments.over_batch else moments.shape[0], moments.groups)
        dtype = wide(moments.dtype)
        row = torch.zeros((2, *shape), dtype=dtype, device=self.device)
        count = torch.zeros((), dtype=torch.int64, device=self.device)
        if state is not None:
            count += state[0]
            row = torch.stack([state[1], state[2]])
        counts = [int(n) for n in gather_rows(self.comm, count, self._next())]
        rows = gather_rows(self.comm, row, self._next())
        seen, mean, spread = 0, torch.zeros_like(row[0]), torch.zeros_like(row[0])
        for part, theirs in zip(counts, rows, strict=True):
            if not part:
                continue
            both, apart = seen + part, theirs[0] - mean
            mean = mean + apart * (part / both)
            spread = spread + theirs[1] + apart.square() * (seen * part / both)
            seen = both
        return seen, mean, spread

    def _summed(self, row: torch.Tensor) -> torch.Tensor:
        first, *others = gather_rows(self.comm, row.contiguous(), self._next())
        for other in others:
            first = first + other
        return first

    # Backward

    def backward(self, gradients: Mapping[str, torch.Tensor | None]) -> tuple[GradientSums, dict[str, torch.Tensor]]:
        """As on one device, after the first rank has shared out the gradients of the boundary."""
        return super().backward(self._shared_out(gradients))

    def _shared_out(self, gradients: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        names, first = self.streaming.boundary, self.comm.rank == 0
        there = torch.tensor([gradients[n] is not None and first for n in names], dtype=torch.int64, device=self.device)
        flags = gather_rows(self.comm, there, self._next())[0].tolist()
        found: dict[str, torch.Tensor | None] = {}
        for name in (n for n, flag in zip(names, flags, strict=True) if flag):
            number, whole = self._next(), gradients[name]
            boxes = [self.shares.graded(name, rank) for rank in range(self.comm.size)]
            if first:
                assert whole is not None
                for rank, box in enumerate(boxes):
                    if rank and box is not None:
                        self.comm.send(cut(whole, box).to(self.network.dtypes[name]), rank, number)
                found[name] = whole
                continue
            found[name] = made = self._blank(name)
            if (box := boxes[self.comm.rank]) is not None:
                part = self.comm.receive(sizes(box), made.dtype, self.device, 0, number)
                cut(made, box).copy_(part.wait())
        return found

    def backward_globals(self, step: GlobalsStep, sums: GradientSums) -> None:
        """As on one device, on every rank alike; parameters get their gradient on the first."""
        self.globals[step.index].backward(self.store, sums if self.comm.rank == 0 else GradientSums())

    def send_back(self, sums: GradientSums) -> None:
        """As on one device, after what the last pass has sent back at once is added up over ranks."""
        if self.at_once:
            self._add_up(self._wanted(self.streaming.stages[-1]), {})
        super().send_back(sums)

    def backward_pass(self, step: PassStep, sums: GradientSums) -> None:
        """Own tiles; then what they send to maps and statistics is added up over ranks."""
        stage = self.streaming.stages[step.index]
        if not any(t in self.store.gradients for t in stage.targets):
            return
        names = self._wanted(stage)
        before = {n: self.store.gradients.pop(n) for n in names if n in self.store.gradients}
        super().backward_pass(step, sums)
        self._add_up(names, before)

    def _wanted(self, stage: TilePass) -> list[str]:
        """What a pass sends gradients to, beside the image."""
        return [n for n in self.shares.read(stage) if self.is_wanted(n)]

    def _add_up(self, names: list[str], before: Mapping[str, torch.Tensor]) -> None:
        """Add up gradients over ranks, and to those that were there before."""
        for name in names:
            own = self.store.gradients.pop(name, None)
            total = self._summed(self._blank(name) if own is None else own.to(self.network.dtypes[name]))
            self.store.gradients[name] = total + before[name] if name in before else total


class _SharedBoundary(torch.autograd.Function):
    """The tiles of a rank: inputs and parameters in, boundary values out, one link of the chain of messages."""

    @staticmethod
    def forward(ctx: Any, execution: _SharedTiles, token: Token, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.execution, ctx.tensors = execution, tensors
        return *execution.boundary(ctx), token.view(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        execution: _SharedTiles = ctx.execution
        sums, inputs = execution.backward(dict(zip(execution.streaming.boundary, gradients[:-1], strict=True)))
        none = torch.zeros((), device=execution.device)
        return None, none, *execution.gradients_of(ctx.tensors, inputs, sums)


class _SharedLoss(torch.autograd.Function):
    """A rank's term of a loss over pixels; its gradients, and all messages, are made in forward."""

    @staticmethod
    def forward(
        ctx: Any, execution: _SharedTiles, loss: PixelLoss, target: StreamedImage, token: Token, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            term, sums, inputs = one_pass(execution, loss, target, gradients=True)
        ctx.found = execution.gradients_of(tensors, inputs, sums)
        return term, token.view(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        by = gradients[0]
        assert by is not None
        none = torch.zeros((), device=by.device)
        return None, None, None, none, *(None if g is None else g * by.to(g.dtype) for g in ctx.found)


def _restricted(step: PassStep, own: set[int]) -> PassStep:
    return PassStep(step.index, tuple(tile for tile in step.tiles if tile in own), step.ahead, step.gradient)
