"""Choosing boundary, tile, kept maps and policies for a budget, from the graph alone.

    plan = outcore.stream.plan_tiles(outcore.capture(model, [(1, 3, 100_000, 100_000)]), memory="40GiB")
    streamed = plan.apply(model)

Time comes from costs per call (`outcore.estimate` for any machine, `outcore.measure` for this one), scaled by the
share of a call's output that a tile computes, halos included; without costs, from FLOPs and bytes by a plain ratio
(`outcore.stream.plan.candidates`). Bytes come from running the largest tile without memory
(`outcore.stream.plan.tile_memory`).

A plan belongs to a size, but tiles of so many pixels take the same at any size, and maps grow with the image: what it
would take at another size is a proportion, so images of one size class share a plan (`StreamPlan.at`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from outcore.cost.costs import Costs
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.graph.structure import device_of
from outcore.machine.units import counted, format_bytes, parse_bytes
from outcore.program import Program, Timeline
from outcore.stream.plan.candidates import StreamCandidates, StreamLimits
from outcore.stream.plan.choose import OrderedCandidates, TileCandidate, choose, worth
from outcore.stream.plan.prepared import StreamMode, bound
from outcore.stream.plan.script import StreamedProgram, emit
from outcore.stream.plan.step_figures import StepFigures
from outcore.stream.plan.tile_memory import StreamBytes

if TYPE_CHECKING:
    from outcore.stream.streamed import Streamed

_MARGIN = {"cuda": 0.08}
"""Share of the budget for the workspaces of kernels."""
_CLASS = 2.0
"""Images whose pixel counts differ by at most this factor share a plan."""
_KNOWN = {"boundary", "tile", "statistics", "keep", "on_host", "rest"}


@dataclass(frozen=True)
class StreamPlan:
    """How a network is streamed at one size."""

    boundary: tuple[str, ...] | None
    tile: tuple[int, ...]
    statistics: bool
    time_s: float
    """Predicted, in the unit of the costs: the time of its program."""
    bytes: StreamBytes
    tiles: int
    overlap: float
    """Elements computed by all tiles of the last pass over those of the whole."""
    passes: int
    """Forward passes over the image."""
    rivals: tuple[TileCandidate, ...] = ()
    """The next best candidates that may fit."""
    keep: tuple[str, ...] = ()
    """Maps between passes that later ones start from."""
    on_host: bool = False
    """Whether those are in host memory."""
    rest: Mapping[str, str] = field(default_factory=dict)
    """Policies of the untiled tail, by its own names."""
    pixels: int = 1
    """The pixels of the image it was made for."""
    usable_bytes: int | None = None
    """The budget it was made for, without margins."""
    stopped: tuple[tuple[str, str], ...] = ()
    """Where streaming stops although it was not asked to: (block, reason)."""
    step: StreamedProgram | None = field(default=None, repr=False, compare=False)
    """The scripts of a step; None where the plan was taken over for another size."""

    @property
    def program(self) -> Program:
        """A step as a program of one stage, tile by tile."""
        return self._scripted.program

    def simulate(self, reserved_bytes: int = 0) -> Timeline:
        """The timeline of a step, with its memory.

        Args:
            reserved_bytes: what is held throughout beside the network: the optimizer's state, the loss.
        """
        return self._scripted.simulate(reserved_bytes)

    @property
    def _scripted(self) -> StreamedProgram:
        if self.step is None:
            raise PlanError(
                "this plan was taken over from an image of another size; plan_tiles for this one scripts it"
            )
        return self.step

    @property
    def peak_bytes(self) -> int:
        """Predicted peak on the device."""
        return self.bytes.peak

    def at(self, pixels: int) -> StreamPlan | None:
        """The same plan for an image of another size; None if it may not fit, or is of another size class."""
        ratio = pixels / self.pixels
        if not 1 / _CLASS <= ratio <= _CLASS:
            return None
        held = self.bytes
        taken = replace(
            held,
            boundary=int(held.boundary * ratio),
            kept=int(held.kept * ratio),
            output=int(held.output * ratio),
            tail=int(held.tail * ratio),
        )
        if self.usable_bytes is not None and taken.peak > self.usable_bytes:
            return None
        tiles = max(1, round(self.tiles * ratio))
        return replace(self, bytes=taken, time_s=self.time_s * ratio, tiles=tiles, step=None)

    def apply(self, model: nn.Module, *, workers: int = 0) -> Streamed:
        """The model, streamed by this plan."""
        from outcore.stream.streamed import stream

        return stream(model, **how_of(self.document()), workers=workers)

    def document(self) -> dict[str, Any]:
        """What a `Plan` says under ``stream``."""
        boundary = None if self.boundary is None else list(self.boundary)
        said: dict[str, Any] = {"boundary": boundary, "tile": list(self.tile), "statistics": self.statistics}
        more = {"keep": list(self.keep), "on_host": self.on_host, "rest": dict(self.rest)}
        return said | {name: value for name, value in more.items() if value}

    @property
    def words(self) -> str:
        """What is streamed, and in which tiles, in words."""
        where = "the whole local part" if self.boundary is None else f"up to {', '.join(self.boundary)}"
        size = " x ".join(map(str, self.tile))
        kept = f", {counted(len(self.keep), 'map')} kept{' on the host' if self.on_host else ''}" if self.keep else ""
        tiles = f"{counted(self.tiles, 'tile')} of {size} px ({self.overlap:.2f}x the computation)"
        return f"stream {where} in {tiles}, forward passes: {self.passes}{kept}"

    def __str__(self) -> str:
        return f"{self.words}, predicted peak {format_bytes(self.peak_bytes)}"


def how_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `stream`, from what a plan says under ``stream``; raises `PlanError` for unknown keys."""
    if unknown := sorted(set(document) - _KNOWN):
        raise PlanError(f"stream has no field {unknown[0]!r}; it has {', '.join(sorted(_KNOWN))}")
    if "tile" not in document:
        raise PlanError('stream needs a tile: {"tile": [2048, 2048]}, pixels of the input per tile')
    tile, boundary = document["tile"], document.get("boundary")
    return {
        "tile": tile if isinstance(tile, int) else tuple(tile),
        "boundary": boundary if boundary is None or isinstance(boundary, str) else tuple(boundary),
        "statistics": bool(document.get("statistics", False)),
        "keep": tuple(document.get("keep", ())),
        "maps_on_host": bool(document.get("on_host", False)),
        "rest": dict(document["rest"]) if document.get("rest") else None,
    }


def plan_tiles(
    graph: Graph,
    *,
    memory: str | int | None,
    costs: Costs | None = None,
    statistics: bool = False,
    fold: bool = True,
    training: bool = True,
    dense: bool = False,
    policies: bool = False,
    workers: int = 0,
    device: str | None = None,
) -> StreamPlan:
    """Choose boundary and tile size for the fastest step within a budget.

    >>> import outcore
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> plan = plan_tiles(outcore.capture(net, [(1, 3, 20_000, 20_000)]), memory="256MiB")
    >>> plan.peak_bytes <= 256 * 2**20
    True

    Args:
        graph: captured at the size of the image, with its model.
        memory: the most a step may hold on the device ("8GiB", bytes); none for the fastest.
        costs: of the graph's calls on the machine that will run it.
        statistics: whether further passes for norms over the image may be planned.
        fold: whether frozen batch norms are folded.
        training: whether there is a backward pass.
        dense: whether the output leaves tile by tile (`Streamed.loss`, `Streamed.tiles`), in one pass.
        policies: whether maps between passes may be kept, on the device or the host, and what runs untiled may be put
            under policies for what its backward needs.
        workers: threads that read pixels ahead.
        device: the kind of device it will run on ("cuda", "cpu"); the model's own if it is not said.

    Raises:
        PlanError: the budget is too small; names the smallest that works.
        StreamError: nothing can be streamed; names the block and the reason.
    """
    network = bound(graph, folded=fold)
    budget = None if memory is None else parse_bytes(memory) if isinstance(memory, str) else memory
    device = device or device_of(network.model).type
    margin = _MARGIN.get(device, 0.0)
    usable = None if budget is None else int(budget * (1 - margin))
    ways = StreamCandidates(network, costs, StreamLimits(statistics, training, dense, policies, device), usable)
    candidates = OrderedCandidates(worth(list(ways.outlines()), usable))
    best, _ = choose(candidates, budget, lambda c: ways.bytes(c).peak, margin=margin)
    rivals = itertools.islice((c for c in candidates if c != best and c.time_s >= best.time_s), 3)
    return _described(ways, best, tuple(rivals), usable, workers)


def plan_by_hand(
    graph: Graph, document: Mapping[str, Any], *, costs: Costs | None = None, dense: bool = False
) -> StreamPlan:
    """What a plan says under ``stream``, with its predicted time and bytes."""
    how = how_of(document)
    ways = StreamCandidates(
        bound(graph, folded=True), costs, StreamLimits(how["statistics"], dense=dense, policies=True), None
    )
    return _described(ways, ways.by_hand(how), (), None, 0)


def _described(
    ways: StreamCandidates, best: TileCandidate, rivals: tuple[TileCandidate, ...], usable: int | None, workers: int
) -> StreamPlan:
    prepared, rest = ways.prepared(best), ways.rest(best)
    stage, cut = prepared.streaming.stages[-1], prepared.grids[-1]
    whole = sum(math.prod(n.shape) for n in stage.nodes)
    allowed, held = ways.allowed, ways.bytes(best)
    figures, graph = StepFigures(prepared, ways.times, held, rest), ways.network.graph
    mode = StreamMode(allowed.training, allowed.dense, workers)
    shapes = tuple(graph.values[name].shape for name in graph.inputs)
    step = StreamedProgram(*emit(prepared, mode, figures), tuple(graph.calls), held, shapes, mode, figures.links)
    return StreamPlan(
        best.boundary,
        best.tile,
        allowed.statistics,
        step.simulate().step_s,
        held,
        len(cut),
        sum(ways.times.computed(stage, cut)[0].values()) / max(1, whole),
        len(prepared.streaming.stages),
        rivals,
        best.keep,
        best.on_host,
        {} if rest is None else rest.policy,
        math.prod(ways.pixels),
        usable,
        prepared.streaming.stopped,
        step,
    )
