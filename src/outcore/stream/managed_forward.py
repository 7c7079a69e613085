"""Stands where a model's ``forward`` was, and streams it: what `outcore.within` puts there when nothing else fits.

    model = outcore.within(model, (slide,), memory="40GiB")     # slide: a tensor, or a source that is read lazily
    loss = criterion(model(slide), label)                       # the loop stays as it is
    loss.backward()

The model stays the object it was: class, parameters, hooks and state_dict are untouched, and the loss is taken on its
output. Forward runs the tiles once and what follows them untiled, backward runs the tiles again: two passes, whatever
the loss. Where the output is a map and the loss a sum over its pixels, `outcore.stream.pixel_loss(model, image,
target=…, loss=…)` takes one, and never holds the map.

The budget is the whole step's: weights, gradients, the optimizer's state, tiles, maps, what follows. Which boundary,
tile, kept maps and policies is decided once per size class (`StreamPlan.at`), so slides of other sizes do not wait for
a plan. Sums over tiles come in another order than plain PyTorch's: the grade is *reassociated*, not *bitwise*, and the
plan, `explain` and `outcore verify` say so.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from outcore.cost.costs import Costs
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import PlanError, StreamError
from outcore.graph import Graph
from outcore.graph.structure import device_of, leaves
from outcore.machine.units import format_bytes, rounded_up
from outcore.stream.arguments import with_fake_tensors, with_lazy_images
from outcore.stream.execute.pixel_loss import Function, PixelLoss
from outcore.stream.plan.plan import StreamPlan, how_of, plan_by_hand, plan_tiles
from outcore.stream.plan.step_document import StreamedStep
from outcore.stream.streamed import Streamed, stream

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_READERS = 4
"""Threads that prefetch lazy images."""


@dataclass(frozen=True)
class StreamSettings:
    """What the user asked for where a model is streamed, as one value."""

    budget_bytes: int | None
    optimizer: OptimizerCost
    reserved_bytes: int = 0
    """Bytes to leave free, for the loss."""
    statistics: bool = False
    """Whether further passes for norms over the image are accepted."""
    by_hand: Mapping[str, Any] | None = None
    """What a plan says under ``stream``."""
    dense: bool = False
    """Whether the loss is over pixels and taken in one pass."""
    device: str | None = None
    """The kind of device it will run on; the model's own if it is not said."""
    image_bytes: int = 0
    """Bytes of images that lie on the device."""


class StreamedForward:
    """What is called instead of the model's ``forward``."""

    def __init__(self, model: nn.Module, wanted: StreamSettings, costs: Costs | None = None) -> None:
        self._model = weakref.ref(model)
        self.wanted, self.costs = wanted, costs
        self.step: StreamedStep | None = None
        """The first step that was planned."""
        self._streamed: Streamed | None = None

    @property
    def model(self) -> nn.Module:
        """The model whose forward this is."""
        model = self._model()
        assert model is not None
        return model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; while it is recorded, as it is."""
        if any(isinstance(t, FakeTensor) for _, t in leaves((args, kwargs), torch.Tensor)):
            return self.original(*args, **kwargs)
        with self.suspended():
            return self.streamed(*args, **kwargs)

    def loss(self, *args: Any, target: Any, loss: PixelLoss | Function, **kwargs: Any) -> torch.Tensor:
        """The loss over the pixels of the output, in one pass."""
        with self.suspended():
            return self.streamed.loss(*args, target=target, loss=loss, **kwargs)

    @property
    def original(self) -> Callable[..., Any]:
        """The model's own forward."""
        own: Callable[..., Any] = type(self.model).forward.__get__(self.model)
        return own

    @property
    def streamed(self) -> Streamed:
        """The model, streamed; made when it is first needed."""
        if self._streamed is None:
            workers = _readers(self.model)
            if self.wanted.by_hand is not None:
                self._streamed = stream(self.model, **how_of(self.wanted.by_hand), workers=workers)
            else:
                self._streamed = stream(self.model, memory=self.tiles_bytes or 2**62, workers=workers)
                self._streamed.planner = self.choose
        return self._streamed

    def close(self) -> None:
        """Drop what was prepared, which holds the model: the next call prepares again."""
        self._streamed = None

    @property
    def tiles_bytes(self) -> int | None:
        """Bytes that the budget leaves for weights, gradients, tiles, maps and the untiled tail."""
        return None if self.wanted.budget_bytes is None else self.wanted.budget_bytes - self.beside_bytes

    def decide(self, graph: Graph) -> StreamedStep:
        """Plan for the graph of a call; raises `PlanError` or `StreamError` if it cannot be done."""
        with self.suspended():
            if self.wanted.by_hand is not None:
                plan = plan_by_hand(graph, self.wanted.by_hand, costs=self.costs, dense=self.wanted.dense)
            else:
                plan = self.choose(graph, self.wanted.dense)
                self.streamed.plans.append((self.wanted.dense, plan))
        images = self.wanted.image_bytes
        beside = self.beside_bytes - images
        self.step = StreamedStep.of(plan, graph, self.costs, self.wanted.budget_bytes, beside, images)
        return self.step

    def choose(self, graph: Graph, dense: bool) -> StreamPlan:
        """The fastest plan within the budget."""
        wanted = self.wanted
        costs = self.costs if self.costs is not None and self.costs.belong_to(graph) else None
        memory = None if self.tiles_bytes is None else max(1, self.tiles_bytes)
        options: dict[str, Any] = {"memory": memory, "costs": costs, "dense": dense, "policies": True}
        options |= {"workers": _readers(self.model), "device": wanted.device}
        try:
            return plan_tiles(graph, statistics=wanted.statistics, **options)
        except (PlanError, StreamError) as error:
            refused = self._whole(error)
            raise (refused if wanted.statistics else _with_statistics(graph, options, refused, self.costs)) from None

    def _whole(self, refused: PlanError | StreamError) -> PlanError | StreamError:
        """A refusal that names the budget of the whole step, as it is given."""
        least, beside = getattr(refused, "least_bytes", None), self.beside_bytes
        if least is None or not beside:
            return refused
        said = PlanError(
            f"streaming cannot meet a budget of {format_bytes(self.wanted.budget_bytes or 0)}: streaming needs at "
            f"least {format_bytes(least + beside)}, {format_bytes(beside)} of it for the optimizer's state, the loss "
            f'and images on the device; give memory="{rounded_up(least + beside)}" or more'
            + ("" if (self.tiles_bytes or 0) > 0 else ", or give images lazily (outcore.data)")
        )
        said.least_bytes = least + beside
        return said

    @property
    def beside_bytes(self) -> int:
        """Bytes that are held beside what streaming counts: the optimizer's state, the loss, images on the device, what
        libraries hold."""
        sizes = {n: p.numel() * p.element_size() for n, p in self.model.named_parameters() if p.requires_grad}
        libraries = self.costs.library_bytes if self.costs is not None else 0
        beside = self.wanted.reserved_bytes + self.wanted.image_bytes
        return beside + self.wanted.optimizer.state_bytes(sizes) + libraries

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which the model has its own forward, without its own hooks: those run around this."""
        attributes = self.model.__dict__
        here, hooks = attributes.pop("forward", None), {name: attributes[name] for name in _HOOKS}
        attributes.update({name: type(found)() for name, found in hooks.items()})
        try:
            yield
        finally:
            attributes.update(hooks)
            if here is not None:
                attributes["forward"] = here

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "wanted": self.wanted, "costs": self.costs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def install_streamed_forward(
    model: nn.Module, graph: Graph, wanted: StreamSettings, costs: Costs | None, refused: PlanError | None = None
) -> StreamedStep:
    """Replace a model's forward by a streamed one.

    Args:
        model: as it is.
        graph: of a call, at its size.
        wanted: the budget, and what may be done.
        costs: of the graph's calls.
        refused: why nothing else would do.

    Raises:
        PlanError: tiles do not meet the budget either; names both.
    """
    streamed_forward = StreamedForward(model, wanted, costs)
    step = _admitted(streamed_forward, graph, refused)
    model.__dict__["forward"] = streamed_forward
    return step


def planned(
    graph: Graph, wanted: StreamSettings, costs: Costs | None, refused: PlanError | None = None
) -> StreamedStep:
    """The plan that `install_streamed_forward` would make for the model of a graph; nothing is changed."""
    return _admitted(StreamedForward(graph._running()[0].model, wanted, costs), graph, refused)


def _admitted(streamed_forward: StreamedForward, graph: Graph, refused: PlanError | None) -> StreamedStep:
    try:
        return streamed_forward.decide(graph)
    except (PlanError, StreamError) as error:
        if refused is None:
            raise
        raise refused_both_ways(refused, error) from None


def refused_both_ways(refused: PlanError, error: PlanError | StreamError) -> PlanError:
    """The error that neither policies nor tiles meet a budget, with the smallest budget that would do."""
    with_policies, in_tiles = refused.least_bytes, getattr(error, "least_bytes", None)
    known = [least for least in (with_policies, in_tiles) if least is not None]
    if in_tiles is not None and in_tiles == min(known):  # of two budgets that would do, the smaller is named
        both = PlanError(f"{str(refused).partition('; give ')[0]}; nor in tiles: {error}")
    else:
        both = PlanError(f"{refused}; tiles do not help: {str(error).partition('; give ')[0]}")
    both.least_bytes = min(known, default=None)
    both.further_passes = getattr(error, "further_passes", "")
    return both


def _with_statistics(graph: Graph, options: dict[str, Any], refused: Exception, costs: Costs | None) -> Exception:
    """The error, with what further passes would change about it."""
    try:
        plan = plan_tiles(graph, statistics=True, **options)
    except (PlanError, StreamError):
        return refused
    if plan.passes == 1:
        return refused
    plain_s = sum(c.time_s for c in costs.calls.values()) if costs is not None else 0.0
    cost = f" and {plan.time_s / plain_s:.1f}x the time of a plain step" if plain_s else ""
    passes = f"for {plan.passes} forward passes over the image, one more per norm over the whole of it{cost}"
    said = type(refused)(f"{refused}; with statistics=True it fits, {passes}")
    if isinstance(said, PlanError) and isinstance(refused, PlanError):
        said.least_bytes, said.further_passes = refused.least_bytes, passes
    return said


def pixel_loss(model: nn.Module, *args: Any, target: Any, loss: PixelLoss | Function, **kwargs: Any) -> torch.Tensor:
    """The loss over the pixels of a model's output; of a model that is streamed, in one pass.

    >>> net, image, labels = nn.Conv2d(3, 2, 3, padding=1), torch.rand(1, 3, 8, 8), torch.zeros(1, 8, 8).long()
    >>> pixel_loss(net, image, target=labels, loss=nn.functional.cross_entropy).shape
    torch.Size([])

    Args:
        model: any; under `outcore.within` it may be streamed, otherwise it is called as it is.
        args: as the model takes them.
        target: a tensor or a source with the output's pixels.
        loss: a function of (output, target) that is a mean over pixels, or a `PixelLoss`.
        kwargs: as the model takes them.
    """
    streamed_forward = model.__dict__.get("forward")
    if isinstance(streamed_forward, StreamedForward):
        return streamed_forward.loss(*args, target=target, loss=loss, **kwargs)
    if isinstance(model, Streamed):
        return model.loss(*args, target=target, loss=loss, **kwargs)
    function = loss.function if isinstance(loss, PixelLoss) else loss
    return function(model(*args, **kwargs), target)


def _readers(model: nn.Module) -> int:
    return _READERS if device_of(model).type == "cuda" else 1


def bytes_on(device: torch.device, tree: Any) -> int:
    """Bytes of the tensors in the arguments that lie on a device; lazy images and shapes take nothing there."""
    return sum(t.numel() * t.element_size() for _, t in leaves(tree, torch.Tensor) if t.device == device)


def without_memory(tree: Any) -> Any:
    """The arguments with fake tensors in place of lazy images and tensors; shapes stay."""
    return with_fake_tensors(with_lazy_images(tree))
