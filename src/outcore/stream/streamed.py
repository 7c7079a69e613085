"""A model that is streamed, as a module for a plain training loop.

    streamed = outcore.stream.stream(model, tile=2048)
    loss = criterion(streamed(image), target)
    loss.backward()

The first call with a new shape records the model at that size on fake tensors and puts the streamed part into stages;
later ones find it ready. The streamed part is one node of autograd: forward runs the first pass over the tiles,
backward the second. What comes after the boundary runs untiled, as recorded, with the user's own modules. Parameters
get the gradients that the plain model would give them, up to the order of sums (grade ``reassociated``).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from outcore.errors import StreamError
from outcore.graph import Graph, capture
from outcore.graph.keys import key_of
from outcore.graph.recording import Context, Ref, Step, Tape, fill, schedule_drops
from outcore.graph.structure import leaves, substitute
from outcore.ops.region import Region
from outcore.stream.dense import Function, PixelLoss, one_pass
from outcore.stream.execution import Counts, Execution, Options
from outcore.stream.fold import finish, fold
from outcore.stream.network import Network
from outcore.stream.source import Image, image_of
from outcore.stream.stages import Streaming, divide
from outcore.stream.tiles import Grid, grid

__all__ = ["Prepared", "Streamed", "stream"]


@dataclass(frozen=True)
class Prepared:
    """A model ready to be streamed at one size."""

    graph: Graph
    network: Network
    streaming: Streaming
    grids: tuple[Grid, ...]
    tail: tuple[Step, ...]
    """What runs untiled."""

    @property
    def tiles(self) -> int:
        """Tiles in all forward passes."""
        return sum(len(g) for g in self.grids)

    @property
    def is_map(self) -> bool:
        """Whether everything is streamed, to one output, which is a map."""
        last, names = self.streaming.stages[-1], self.streaming.boundary
        return not self.tail and names == self.graph.outputs == last.maps and not last.reductions


class Streamed(nn.Module):
    """A model whose early, local part runs tile by tile; made by `stream`."""

    model: nn.Module
    """The user's model."""

    def __init__(
        self,
        model: nn.Module,
        *,
        tile: int | Sequence[int],
        boundary: Iterable[str] | None,
        statistics: bool,
        keep: Collection[str],
        folded: bool,
        options: Options,
    ) -> None:
        super().__init__()
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["model"] = model
        self.tile, self.boundary, self.statistics = tile, boundary, statistics
        self.keep, self.folded, self.options = keep, folded, options
        self.counts = Counts()
        """What the last step ran."""
        self._prepared: dict[Hashable, Prepared] = {}
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
        boundary = _run(execution, given)
        values = dict(zip(prepared.streaming.boundary, boundary, strict=True))
        return self._finish(prepared, values, given)

    def is_map(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the model is streamed to its one output, a map, at this size."""
        return self.prepare(*args, **kwargs).is_map

    @torch.no_grad()
    def tiles(self, *args: Any, **kwargs: Any) -> Iterator[tuple[Region, torch.Tensor]]:
        """The output of a network that gives a map, tile by tile: each region with its part, nothing kept."""
        if not self.is_map(*args, **kwargs):
            raise StreamError("the network is not streamed to one output that is a map; call it for its output")
        _, execution, _ = self._begin(args, kwargs)
        yield from execution.output_tiles()

    def loss(self, *args: Any, target: Any, loss: PixelLoss | Function, **kwargs: Any) -> torch.Tensor:
        """The loss over all pixels of a network whose output is a map, in one pass.

        Args:
            args: as the model takes them.
            target: a tensor or a source with the output's pixels.
            loss: a function of (output, target) that is a mean over pixels, or a `PixelLoss`.
            kwargs: as the model takes them.
        """
        prepared, execution, given = self._begin(args, kwargs)
        if not self.is_map(*args, **kwargs):
            names = prepared.streaming.boundary
            rest = ", ".join(dict.fromkeys(prepared.graph.calls[s.name].block for s in prepared.tail[:3]))
            raise StreamError(
                f"a loss over pixels needs a network that is streamed to its one output, a map; here {rest or names} "
                "is not; stop before it, or use streamed(x) and an ordinary loss (two passes)"
            )
        pixel_loss = loss if isinstance(loss, PixelLoss) else PixelLoss(loss)
        return _run_loss(execution, given, pixel_loss, image_of(target))

    def prepare(self, *args: Any, **kwargs: Any) -> Prepared:
        """Record and divide the model for inputs of this size; shapes may stand for tensors."""
        args, kwargs = _lazily((args, kwargs))
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.get_default_dtype())
        shapes = [torch.empty(a, dtype=dtype, device="meta") if _is_shape(a) else a for a in args]
        return self._prepare(*_stood((tuple(shapes), kwargs)))

    def _begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Prepared, Execution, dict[str, torch.Tensor | Image]]:
        device = _device(self.model)
        args, kwargs = _lazily((args, kwargs))
        prepared = self._prepare(*_stood((args, kwargs)))
        found = [leaf for _, leaf in leaves((args, kwargs), (torch.Tensor, _Lazy))]
        given = {
            name: leaf.image if isinstance(leaf, _Lazy) else leaf
            for name, leaf in zip(prepared.graph.inputs, found, strict=True)
        }
        streamed = set(prepared.network.inputs)
        self._step += 1
        execution = Execution(
            prepared.network,
            prepared.streaming,
            prepared.grids,
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

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        key = key_of(self.model, args, kwargs)
        if key not in self._prepared:
            graph = capture(self.model, args, kwargs)
            if graph.module.recordings == {} or graph._running()[1].uses_data:
                raise StreamError(
                    "the model looks at numbers in its tensors, so what it does to a tile is not known from the whole; "
                    "stream a part of it that does not"
                )
            network = Network(graph)
            if self.folded:
                fold(network)
                finish(network)
            self._prepared[key] = divided(
                network, tile=self.tile, boundary=self.boundary, statistics=self.statistics, keep=self.keep
            )
        return self._prepared[key]

    def _finish(self, prepared: Prepared, values: dict[str, Any], given: dict[str, Any]) -> Any:
        """Run the rest untiled."""
        recording = prepared.network.recording
        needed = {r.name for s in prepared.tail for _, r in leaves((s.args, s.kwargs), Ref) if r.kind == "value"}
        needed |= {r.name for _, r in leaves(recording.result, Ref) if r.kind == "value"}
        for name, x in given.items():
            if name in needed:
                values[name] = x if isinstance(x, torch.Tensor) else _whole(x, _device(self.model))
        tape = Tape(self.model, recording.constants, values)
        tape.run(prepared.tail, recording.ambient)
        return fill(recording.result, tape.get)


def divided(
    network: Network,
    *,
    tile: int | Sequence[int],
    boundary: Iterable[str] | None = None,
    statistics: bool = False,
    keep: Collection[str] = (),
) -> Prepared:
    """Put a network into stages and tiles."""
    streaming = divide(network, boundary=boundary, statistics=statistics, keep=keep)
    rank = network.rank
    pixels = (tile,) * rank if isinstance(tile, int) else tuple(tile)
    if len(pixels) != rank or min(pixels) < 1:
        raise StreamError(f"tile={tile} must be one number above zero, or {rank} of them (one per dimension of pixels)")
    grids = tuple(grid(network, stage, pixels) for stage in streaming.stages)
    tail = [replace(s) for s in network.recording.steps if s.name not in streaming.calls]
    schedule_drops(tail, [r.name for _, r in leaves(network.recording.result, Ref)])
    return Prepared(network.graph, network, streaming, grids, tuple(tail))


def stream(
    model: nn.Module,
    *,
    tile: int | Sequence[int],
    boundary: str | Iterable[str] | None = None,
    statistics: bool = False,
    keep: Collection[str] = (),
    fold: bool = True,
    workers: int = 0,
    twins: bool = True,
    maps_on_host: bool = False,
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
        boundary: blocks (or values) after which streaming stops; none to go as far as it can.
        statistics: accept further passes for norms, pools and squeeze-excite blocks over the whole image.
        keep: values that are put together and kept, so that later passes start from them.
        fold: fold batch norms with frozen statistics into the convolutions before them.
        workers: threads that read lazy images ahead.
        twins: compute tiles of equal, constant pixels once.
        maps_on_host: keep maps in host memory.
    """
    return Streamed(
        model,
        tile=tile,
        boundary=(boundary,) if isinstance(boundary, str) else boundary,
        statistics=statistics,
        keep=keep,
        folded=fold,
        options=Options(workers, twins, maps_on_host),
    )


# One node of autograd


class _Boundary(torch.autograd.Function):
    """The streamed part: inputs and parameters in, boundary values out."""

    @staticmethod
    def forward(ctx: Any, execution: Execution, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.execution, ctx.tensors = execution, tensors
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            values = execution.forward()
        made = tuple(values[v].detach() for v in execution.streaming.boundary)
        ctx.mark_non_differentiable(*(t for t in made if not t.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        execution: Execution = ctx.execution
        sums, inputs = execution.backward(dict(zip(execution.streaming.boundary, gradients, strict=True)))
        names = [name for name in execution.network.graph.inputs if name in execution.wants]
        first = [inputs.get(name) for name in names]
        return None, *first, *(sums.of(t) for t in ctx.tensors[len(first) :])


class _Loss(torch.autograd.Function):
    """The loss over pixels; its gradients are there when it is."""

    @staticmethod
    def forward(ctx: Any, execution: Execution, loss: PixelLoss, target: Image, *tensors: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            total, sums, inputs = one_pass(execution, loss, target, gradients=True)
        names = [name for name in execution.network.graph.inputs if name in execution.wants]
        ctx.found = [inputs.get(n) for n in names] + [sums.of(t) for t in tensors[len(names) :]]
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        return None, None, None, *(None if g is None else g * gradient.to(g.dtype) for g in ctx.found)


def _run_loss(execution: Execution, given: dict[str, Any], loss: PixelLoss, target: Image) -> torch.Tensor:
    inputs, parameters = _tracked(execution, given)
    if torch.is_grad_enabled() and (inputs or parameters):
        made: torch.Tensor = _Loss.apply(execution, loss, target, *inputs, *parameters)  # type: ignore[no-untyped-call]
        return made
    return one_pass(execution, loss, target, gradients=False)[0]


def _tracked(execution: Execution, given: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs and parameters that want gradients."""
    network = execution.network
    inputs = [given[name] for name in network.graph.inputs if name in execution.wants]
    calls = execution.streaming.calls
    names = dict.fromkeys(p for name, c in network.graph.calls.items() if name in calls for p in c.parameters)
    states = [network.state(Ref("state", name)) for name in names]
    return inputs, list({id(t): t for t in states if t.requires_grad}.values())


def _run(execution: Execution, given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    inputs, parameters = _tracked(execution, given)
    if torch.is_grad_enabled() and (inputs or parameters):
        made: tuple[torch.Tensor, ...] = _Boundary.apply(execution, *inputs, *parameters)  # type: ignore[no-untyped-call]
        return made
    values = execution.forward()
    return tuple(values[v] for v in execution.streaming.boundary)


# Lazy images among the arguments


@dataclass(frozen=True)
class _Lazy:
    """A lazy image, and the tensor without memory that stands for it while recording."""

    image: Image
    stand_in: torch.Tensor


def _lazily(tree: Any) -> Any:
    """Replace lazy images in the arguments."""

    def is_image(leaf: Any) -> bool:
        return not isinstance(leaf, torch.Tensor) and all(hasattr(leaf, a) for a in ("shape", "dtype", "read"))

    def change(leaf: Any) -> Any:
        if isinstance(leaf, (tuple, list)) and not is_image(leaf):
            return type(leaf)(change(part) for part in leaf)
        if isinstance(leaf, dict):
            return {k: change(part) for k, part in leaf.items()}
        if not is_image(leaf):
            return leaf
        image = image_of(leaf)
        return _Lazy(image, torch.empty(image.shape, dtype=image.dtype, device="meta"))

    return change(tree)


@functools.lru_cache(maxsize=64)
def _without_memory(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta").requires_grad_(requires_grad)


def _stood(tree: Any) -> Any:
    """The arguments with tensors without memory in place of all images and tensors."""

    def stand_in(leaf: Any) -> torch.Tensor:
        if isinstance(leaf, _Lazy):
            return leaf.stand_in
        return _without_memory(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)

    return substitute(tree, (torch.Tensor, _Lazy), stand_in)


def _whole(image: Image, device: torch.device) -> torch.Tensor:
    region = tuple((0, n) for n in image.shape)
    return image.prepare(image.read(region).to(device))


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(n, int) for n in value)


def _device(model: nn.Module) -> torch.device:
    first = next(iter((*model.parameters(), *model.buffers())), None)
    return first.device if first is not None else torch.device("cpu")
