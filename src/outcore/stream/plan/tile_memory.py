"""How much memory a tile takes, found by running it on fake tensors.

A tile is run forward and backward on *fake* tensors, which have sizes but no content, while a counter adds up what is
alive (`outcore.cost.measured.live_bytes`). The code that is counted is the code that runs, so saved tensors, copies
made for padding and temporary gradients are all in it; the workspace of a kernel is not (on a GPU a margin is added for
it).

    parameters + sums of gradients + maps + their gradients + one tile (values, saved tensors, gradients)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from outcore.cost.measured.live_bytes import LiveBytes
from outcore.errors import StreamError
from outcore.graph.record.preserve import state_restored
from outcore.graph.record.recording import Ref, Tape
from outcore.graph.structure import device_of, leaves
from outcore.ops.region import elements, sizes
from outcore.stream.call import RuleContext
from outcore.stream.execute.tile_run import run_tile
from outcore.stream.execute.untiled_tail import UntiledTail
from outcore.stream.network import RegionNetwork
from outcore.stream.plan.passes import TilePass
from outcore.stream.plan.prepared import PreparedStream
from outcore.stream.plan.tiles import Grid, TilePlan, plan_tile
from outcore.stream.rules.border import sliced
from outcore.stream.rules.convolve import ConvolutionRule
from outcore.stream.rules.pool import MaxPool

_WORTH_TRYING = 0.6
"""Tiles with a smaller share of the elements of the largest, in whatever pass, are assumed to need fewer bytes."""
_CLOSE = 0.97
"""The same for tiles of one pass, whose bytes were seen to be proportional to their elements to about one in a
hundred."""


@dataclass(frozen=True)
class TileBytes:
    """The peak of one tile, above what is there before and after."""

    forward: int
    """Without gradients; not computed in training, where it is less."""
    backward: int
    """Forward with gradients on, and backward."""


@dataclass(frozen=True)
class StreamBytes:
    """The peak of a step, and its parts."""

    parameters: int
    gradients: int
    """The gradients of all parameters, once a step is over."""
    boundary: int
    """Maps that the untiled tail, or the user, gets."""
    kept: int
    """Maps that later passes start from."""
    output: int
    """The part of the boundary that is the model's own output: the user holds it until the end."""
    tile_forward: int
    """Where there is no backward pass."""
    tile_backward: int
    small: int
    """Global values such as folded weights, and their gradients."""
    tail: int
    """Peak of the untiled tail, above the maps."""
    read: int
    """Prefetched pixels, in host memory."""
    workspace: int = 0
    """The largest workspace of an operation."""
    training: bool = True
    """Whether there is a backward pass."""

    @property
    def peak(self) -> int:
        """The most that is held at once on the device."""
        maps = self.kept + self.boundary
        first = maps + self.tile_forward
        rest = maps + self.tail + self.gradients
        second = maps + self.output + self.kept + self.tile_backward + self.gradients if self.training else 0
        return self.parameters + self.small + self.workspace + max(first, rest, second)


def largest_tile(network: RegionNetwork, stage: TilePass, cut: Grid) -> TilePlan:
    """The tile with the most elements: one in the middle, or the first where there is no middle."""
    return max(_kinds(network, stage, cut), key=lambda p: p.elements())


def _kinds(network: RegionNetwork, stage: TilePass, cut: Grid) -> list[TilePlan]:
    """Tiles of every kind: corners, edges, the middle."""
    places = (sorted({0, c // 2, c - 1}) for c in cut.counts)
    return [p for n in itertools.product(*places) if (p := plan_tile(network, stage, cut, n)) is not None]


def _extremes(network: RegionNetwork, stage: TilePass, cut: Grid) -> list[TilePlan]:
    """The tiles that may take the most: those with the most elements, copies that padding makes included."""
    kinds = _kinds(network, stage, cut)
    first, last = min(kinds, key=lambda p: p.number), max(kinds, key=lambda p: p.number)
    most = sorted(kinds, key=lambda p: held_elements(stage, p), reverse=True)[:2]
    tried = [*most, *(p for p in (first, last) if p not in most)]
    return [p for p in tried if held_elements(stage, p) >= _CLOSE * held_elements(stage, most[0])]


def held_elements(stage: TilePass, plan: TilePlan) -> int:
    """Elements in all values of a tile, and in the copies that padding makes."""
    copied = (n for n in stage.nodes if n.output in plan.needs and n.output not in plan.widened)
    padded = (
        n for n in copied if isinstance(n.rule, (ConvolutionRule, MaxPool)) and n.rule.pads(plan.regions[n.output])
    )
    return plan.elements() + sum(elements(plan.needs[n.output][0]) for n in padded)


def tile_bytes(network: RegionNetwork, stage: TilePass, plan: TilePlan, *, training: bool = True) -> TileBytes:
    """Run one tile on fake tensors and count."""
    device = device_of(network.model)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        state = {
            ref: fake.from_tensor(network.state(ref)) for n in stage.nodes for ref in n.operands if ref.kind != "value"
        }

        def crops() -> dict[str, torch.Tensor]:
            return {
                name: torch.empty(sizes(plan.regions[name]), dtype=network.dtypes[name], device=device)
                for name in (*stage.sources, *stage.smalls)
                if name in plan.regions
            }

        if training:
            with LiveBytes(list(state.values())) as live, torch.enable_grad():
                return TileBytes(0, _backward(network, stage, plan, crops(), state, live))
        with LiveBytes(list(state.values())) as live, torch.no_grad():
            run_tile(network, stage, plan, crops(), state, RuleContext())
            return TileBytes(live.peak, live.peak)


def _backward(
    network: RegionNetwork,
    stage: TilePass,
    plan: TilePlan,
    given: dict[str, torch.Tensor],
    state: Mapping[Ref, torch.Tensor],
    live: LiveBytes,
) -> int:
    leaves_ = [t.requires_grad_() for n, t in given.items() if n in stage.smalls and t.is_floating_point()]
    wanted = [*leaves_, *{id(t): t for t in state.values() if t.requires_grad}.values()]
    made = run_tile(network, stage, plan, given, state, RuleContext())
    outputs = []
    for name, region in plan.targets.items():
        value = stage.targets[name]
        part = sliced(made[value], plan.regions[value], region)
        reduction = network.nodes[name].reduction
        if reduction is not None and hasattr(reduction, "dims"):
            part = part.sum(reduction.dims)
        outputs.append(part)
    del made, given
    outputs = [o for o in outputs if o.requires_grad]
    if outputs and wanted:
        torch.autograd.grad(outputs, wanted, [torch.empty_like(o) for o in outputs], allow_unused=True)
    return live.peak


def _tail_bytes(prepared: PreparedStream, *, training: bool) -> int:
    """Peak of the untiled tail, forward and backward, above the maps it starts from."""
    network = prepared.network
    if not prepared.tail:
        return 0
    device = device_of(network.model)
    with state_restored(network.model), FakeTensorMode(allow_non_fake_inputs=True):
        values = {
            name: torch.empty(network.shapes[name], dtype=network.dtypes[name], device=device)
            for name in (*prepared.streaming.boundary, *network.graph.inputs)
        }
        wanted = [n for n in prepared.streaming.boundary if training and values[n].is_floating_point()]
        starts = [values[name].requires_grad_() for name in wanted]
        with torch.enable_grad():
            values |= {name: values[name].clone() for name in wanted}  # the tail may write into its inputs
        real = [*network.model.parameters(), *network.model.buffers()]
        with LiveBytes([*values.values(), *real]) as live, torch.set_grad_enabled(training):
            tape = Tape(network.model, network.recording.constants, dict(values))
            try:
                tape.run(prepared.tail, network.recording.ambient)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise StreamError(
                    "what follows the tiles depends on the numbers of the image (a branch or a size is computed from "
                    f"them: {error}), so its memory cannot be predicted; plan without streaming"
                ) from error
            found = [tape.values[r.name] for _, r in leaves(network.recording.result, Ref) if r.kind == "value"]
            outputs = [t for t in found if t.requires_grad]
            del found
            tape.values.clear()
            if outputs and starts:
                torch.autograd.grad(outputs, starts, [torch.empty_like(o) for o in outputs], allow_unused=True)
        peak: int = live.peak
    return peak


def predict_bytes(
    prepared: PreparedStream,
    *,
    training: bool = True,
    dense: bool = False,
    on_host: bool = False,
    rest: UntiledTail | None = None,
) -> StreamBytes:
    """The bytes of a step, before anything is run.

    Args:
        prepared: the network in stages and tiles.
        training: whether there is a backward pass.
        dense: whether the output leaves tile by tile and is not put together (`Streamed.loss`, `Streamed.tiles`).
        on_host: whether maps between passes are in host memory.
        rest: what follows the boundary, where it runs under policies.
    """
    network, streaming = prepared.network, prepared.streaming
    tried = [
        (stage, plan)
        for stage, cut in zip(streaming.stages, prepared.grids, strict=True)
        if stage.makes  # the last may have global nodes alone
        for plan in _extremes(network, stage, cut)
    ]
    most = max(plan.elements() for _, plan in tried)
    found = [
        tile_bytes(network, stage, plan, training=training)
        for stage, plan in tried
        if plan.elements() >= _WORTH_TRYING * most
    ]

    def size(names: Iterable[str]) -> int:
        return sum(math.prod(network.shapes[m]) * network.dtypes[m].itemsize for m in names)

    kept = set(streaming.kept)
    boundary = set(streaming.boundary) - kept if not dense else set()
    parameters = list(network.model.parameters())
    state = sum(t.numel() * t.element_size() for t in (*parameters, *network.model.buffers()))
    gradients = sum(p.numel() * max(4, p.element_size()) for p in parameters if p.requires_grad) if training else 0
    stage, cut = streaming.stages[0], prepared.grids[0]
    read = largest_tile(network, stage, cut)
    pixels = sum(math.prod(sizes(read.regions[n])) for n in stage.sources if n in read.regions)
    globals_ = [n for s in streaming.stages for n in s.globals]
    small = sum(math.prod(n.shape) * n.dtype.itemsize for n in globals_) * (2 if training else 1)
    return StreamBytes(
        parameters=state,
        gradients=gradients,
        boundary=size(boundary),
        kept=0 if on_host else size(kept),
        output=size(boundary & set(network.graph.outputs)),
        tile_forward=max(f.forward for f in found),
        tile_backward=max(f.backward for f in found),
        small=small,
        tail=rest.peak_bytes if rest is not None and rest.planned else _tail_bytes(prepared, training=training),
        read=pixels,
        training=training,
    )
