"""A model that is streamed, as a module for a plain training loop.

    streamed = outcore.stream.stream(model, tile=2048)
    loss = criterion(streamed(image), target)
    loss.backward()

The first call with a new shape, or with another value in an attribute or name that the model's code reads, records the
model at that size on fake tensors and puts the streamed part into stages; later ones find it ready. The streamed part
is one node of autograd: forward runs the first pass over the tiles, backward the second. What comes after the boundary
runs untiled, as recorded, with the user's own modules. Parameters get the gradients that the plain model would give
them, up to the order of sums (grade ``reassociated``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outcore.errors import StreamError
from outcore.graph import Graph, capture
from outcore.graph.record.captured_module import RecordingVersions
from outcore.graph.record.keys import key_of
from outcore.graph.record.recording import Context
from outcore.graph.structure import device_of, leaves
from outcore.machine.units import parse_bytes
from outcore.ops.region import Region
from outcore.program.script import Script
from outcore.stream.arguments import LazyImage, is_shape, whole_image, with_fake_tensors, with_lazy_images
from outcore.stream.execute.boundary import run, run_loss
from outcore.stream.execute.execution import Execution
from outcore.stream.execute.pixel_loss import Function, PixelLoss
from outcore.stream.execute.step_context import TileCounts, TileOptions
from outcore.stream.execute.tile_schedule import TileSchedule, compile_tiles
from outcore.stream.execute.untiled_tail import UntiledTail
from outcore.stream.plan.plan import StreamPlan, plan_tiles
from outcore.stream.plan.prepared import PreparedStream, StreamMode, bound, divided
from outcore.stream.plan.script import emit
from outcore.stream.source import StreamedImage, image_of

Planner = Callable[[Graph, bool], StreamPlan]
"""Plans for a graph, and for one pass or several."""

_SIZES = 64
"""Sizes of images that are remembered."""


@dataclass(frozen=True)
class StreamOptions:
    """What is streamed, and in which tiles; see `stream`."""

    tile: tuple[int, ...] | int | None = None
    memory: str | int | None = None
    boundary: tuple[str, ...] | None = None
    statistics: bool = False
    keep: frozenset[str] = frozenset()
    fold: bool = True
    rest: Mapping[str, str] | None = None
    """Policies of the untiled tail."""
    on_host: bool = False
    """Keep maps that later passes start from in host memory."""

    def __post_init__(self) -> None:
        if self.tile is None and self.memory is None:
            raise StreamError("give tile= (pixels of the input per tile), or memory= to have it chosen")


class Streamed(nn.Module):
    """A model whose early, local part runs tile by tile; made by `stream`."""

    model: nn.Module
    """The user's model."""

    def __init__(self, model: nn.Module, how: StreamOptions, options: TileOptions) -> None:
        super().__init__()
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["model"] = model
        self.how, self.options = how, options
        self.counts = TileCounts()
        """What the last step ran."""
        self.planner: Planner | None = None
        """Plans where no tile was given, for each size class; by default for the memory that was given."""
        self.plans: list[tuple[bool, StreamPlan]] = []
        """The plans that were made, and whether for one pass; the latest last."""
        self._prepared: dict[Hashable, PreparedStream] = {}
        self._versions = RecordingVersions()
        self._rests: dict[int, UntiledTail] = {}
        """By the identity of what was prepared."""
        self._schedules: dict[tuple[int, StreamMode], tuple[tuple[Script, Script], TileSchedule]] = {}
        """By the same and how it is run: the scripts, and what they were compiled to."""
        self._step = 0

    @property
    def training(self) -> bool:
        """The model's own flag."""
        return "model" not in self.__dict__ or self.__dict__["model"].training

    @training.setter
    def training(self, mode: bool) -> None:
        if "model" in self.__dict__:
            self.__dict__["model"].training = mode

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.model.load_state_dict(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns. Images may be tensors on any device, or sources that are read lazily."""
        prepared, execution, given = self._begin(args, kwargs)
        boundary = run(execution, given)
        values = dict(zip(prepared.streaming.boundary, boundary, strict=True))
        return self._finish(prepared, values, given)

    def is_map(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the model is streamed to its one output, a map, at this size."""
        return self.prepare(*args, **kwargs).is_map

    @torch.no_grad()
    def tiles(self, *args: Any, skip: Collection[Region] = (), **kwargs: Any) -> Iterator[tuple[Region, torch.Tensor]]:
        """The output of a network that gives a map, tile by tile: each region with its part, nothing kept.

        Args:
            args: as the model takes them.
            skip: regions of the output that are not wanted, of those that an earlier call gave.
            kwargs: as the model takes them.
        """
        prepared, execution, _ = self._begin(args, kwargs, dense=True, training=False)
        if not prepared.is_map:
            raise StreamError("the network is not streamed to one output that is a map; call it for its output")
        yield from execution.output_tiles(skip)

    def loss(self, *args: Any, target: Any, loss: PixelLoss | Function, **kwargs: Any) -> torch.Tensor:
        """The loss over all pixels of a network whose output is a map, in one pass.

        Args:
            args: as the model takes them.
            target: a tensor or a source with the output's pixels.
            loss: a function of (output, target) that is a mean over pixels, or a `PixelLoss`.
            kwargs: as the model takes them.
        """
        prepared, execution, given = self._begin(args, kwargs, dense=True)
        if not prepared.is_map:
            rest = ", ".join(dict.fromkeys(prepared.graph.calls[s.name].block for s in prepared.tail[:3]))
            raise StreamError(
                "a loss over pixels needs a network that is streamed to its one output, a map; here "
                f"{rest or prepared.streaming.boundary} is not; stop before it, or use streamed(x) and an ordinary "
                "loss (two passes)"
            )
        pixel_loss = loss if isinstance(loss, PixelLoss) else PixelLoss(loss)
        return run_loss(execution, given, pixel_loss, image_of(target))

    def prepare(self, *args: Any, **kwargs: Any) -> PreparedStream:
        """Record and divide the model for inputs of this size; shapes may stand for tensors."""
        args, kwargs = with_lazy_images((args, kwargs))
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.get_default_dtype())
        shapes = [torch.empty(a, dtype=dtype, device="meta") if is_shape(a) else a for a in args]
        return self._prepare(*with_fake_tensors((tuple(shapes), kwargs)), dense=False)

    def _begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, dense: bool = False, training: bool = True
    ) -> tuple[PreparedStream, Execution, dict[str, torch.Tensor | StreamedImage]]:
        device = device_of(self.model)
        args, kwargs = with_lazy_images((args, kwargs))
        prepared = self._prepare(*with_fake_tensors((args, kwargs)), dense=dense)
        found = [leaf for _, leaf in leaves((args, kwargs), (torch.Tensor, LazyImage))]
        given = {
            name: leaf.image if isinstance(leaf, LazyImage) else leaf
            for name, leaf in zip(prepared.graph.inputs, found, strict=True)
        }
        streamed = set(prepared.network.inputs)
        if (effects := prepared.network.recording.effects) is not None:
            effects.apply_plain(self.model, "a streamed model")
        self._step += 1
        execution = Execution(
            prepared.network,
            prepared.streaming,
            prepared.kinds,
            self.schedule(prepared, StreamMode(training, dense and prepared.is_map, self.options.workers)),
            {name: image_of(x) for name, x in given.items() if name in streamed},
            {name: x for name, x in given.items() if name not in streamed and isinstance(x, torch.Tensor)},
            frozenset(name for name, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad),
            device,
            Context.current(sorted({"cpu", device.type})),
            hash((torch.initial_seed(), self._step)),
            self.options,
        )
        self.counts = execution.counts
        return prepared, execution, given

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, dense: bool) -> PreparedStream:
        how = self.how
        key = self._versions.find((key_of(self.model, args, kwargs), dense and how.tile is None))
        if key not in self._prepared:
            graph = capture(self.model, args, kwargs)
            if graph._running()[1].uses_data or graph._running()[1].volatile:
                raise StreamError(
                    "the model looks at numbers in its tensors, so what it does to a tile is not known from the whole; "
                    "stream a part of it that does not"
                )
            while len(self._prepared) >= _SIZES:
                self._forget(next(iter(self._prepared)))
            self._prepared[key] = self._ready(graph, dense)
            for old in self._versions.add(key, graph._running()[1].reads):
                self._forget(old)
        return self._prepared[key]

    def _forget(self, key: Hashable) -> None:
        gone = id(self._prepared.pop(key, None))
        self._rests.pop(gone, None)
        self._schedules = {known: made for known, made in self._schedules.items() if known[0] != gone}

    def _ready(self, graph: Graph, dense: bool) -> PreparedStream:
        how, network = self.how, bound(graph, folded=self.how.fold)
        if how.tile is not None:
            prepared = divided(
                network,
                tile=how.tile,
                boundary=how.boundary,
                statistics=how.statistics,
                keep=how.keep,
                on_host=how.on_host,
            )
            return self._with_rest(prepared, how.rest)
        pixels = max((network.pixels(name) for name in network.inputs), default=1)
        mode = StreamMode(True, dense, self.options.workers)
        made = [p for one_pass, p in reversed(self.plans) if one_pass == dense]
        exact = [p for p in made if p.step is not None and p.step.is_for(graph, mode)]
        plan = next((p for p in (*exact, *(p.at(pixels) for p in made)) if p is not None), None)
        if plan is None:
            plan = (self.planner or self._planned)(graph, dense)
            self.plans.append((dense, plan))
        prepared = divided(
            network,
            tile=plan.tile,
            boundary=plan.boundary,
            statistics=plan.statistics,
            keep=plan.keep,
            on_host=plan.on_host or how.on_host,
        )
        if plan.step is not None and plan.step.is_for(graph, mode) and plan.on_host == prepared.on_host:
            prepared.scripts[mode] = plan.step.forward, plan.step.backward
        return self._with_rest(prepared, plan.rest)

    def schedule(self, prepared: PreparedStream, mode: StreamMode) -> TileSchedule:
        """What is executed, compiled from the scripts of a step."""
        if mode not in prepared.scripts:
            prepared.scripts[mode] = emit(prepared, mode)
        scripts = prepared.scripts[mode]
        known = self._schedules.get((id(prepared), mode))
        if known is None or known[0] is not scripts:
            made = compile_tiles(*scripts, prepared.streaming, tuple(prepared.graph.calls))
            self._schedules[id(prepared), mode] = known = scripts, made
        return known[1]

    def _with_rest(self, prepared: PreparedStream, policy: Mapping[str, str] | None) -> PreparedStream:
        if policy:
            rest = UntiledTail(prepared)
            rest.plan(None, None, policy)
            self._rests[id(prepared)] = rest
        return prepared

    def _planned(self, graph: Graph, dense: bool) -> StreamPlan:
        how = self.how
        return plan_tiles(
            graph,
            memory=how.memory,
            statistics=how.statistics,
            fold=how.fold,
            dense=dense,
            workers=self.options.workers,
        )

    def _finish(self, prepared: PreparedStream, values: dict[str, Any], given: dict[str, Any]) -> Any:
        """Run the untiled tail."""
        rest = self._rests.get(id(prepared)) or UntiledTail(prepared)
        for name in rest.inputs:
            if name in given:
                x = given[name]
                values[name] = x if isinstance(x, torch.Tensor) else whole_image(x, device_of(self.model))
        return rest(*(values.pop(name) for name in rest.inputs))


def stream(
    model: nn.Module,
    *,
    tile: int | Sequence[int] | None = None,
    memory: str | int | None = None,
    boundary: str | Iterable[str] | None = None,
    statistics: bool = False,
    keep: Collection[str] = (),
    fold: bool = True,
    workers: int = 0,
    duplicates: bool = True,
    maps_on_host: bool = False,
    cache: str | int = 0,
    rest: Mapping[str, str] | None = None,
) -> Streamed:
    """Stream the early, local part of a model tile by tile, exactly.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> streamed = stream(net, tile=16)
    >>> x = torch.rand(1, 3, 50, 70)
    >>> torch.allclose(streamed(x), net(x), atol=1e-6)
    True

    Args:
        model: any module; nothing in it is changed.
        tile: pixels of the input per tile, along each dimension or one number for all; the halo comes on top.
        memory: instead of a tile, the most a step may hold; tile and boundary are then chosen for each size of image.
        boundary: blocks (or values) after which streaming stops; none to go as far as it can.
        statistics: accept further passes for norms, pools and squeeze-excite blocks over the whole image.
        keep: values that are put together and kept, so that later passes start from them.
        fold: fold batch norms with frozen statistics into the convolutions before them.
        workers: threads that read lazy images ahead.
        duplicates: compute tiles of equal, constant pixels once.
        maps_on_host: keep maps that later passes start from in host memory.
        cache: host memory for pixels read in the first pass, so that the second need not read them again.
        rest: policies of what runs untiled, by value, as `outcore.within` chooses them.
    """
    how = StreamOptions(
        tile if tile is None or isinstance(tile, int) else tuple(tile),
        memory,
        (boundary,) if isinstance(boundary, str) else None if boundary is None else tuple(boundary),
        statistics,
        frozenset(keep),
        fold,
        rest,
        maps_on_host,
    )
    return Streamed(
        model,
        how,
        TileOptions(workers, duplicates, parse_bytes(cache) if isinstance(cache, str) else cache),
    )
