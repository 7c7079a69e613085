"""Losses that are sums over pixels: one pass.

When the network's output is a map and the loss is a sum (or mean) over its pixels, a tile's backward can run as soon as
the tile is computed. No map is assembled and nothing is run twice: each tile runs forward and backward once. Only
stages before it (statistics of norms) still take passes of their own.

Tiles of constant pixels with a constant target are collected and run once at the end, weighted by how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from outcore.errors import StreamError
from outcore.ops.region import Region, elements
from outcore.stream.execute.execution import Execution
from outcore.stream.execute.gradient_sums import GradientSums
from outcore.stream.execute.step_context import PrefetchedPixels
from outcore.stream.execute.tile_classes import StreamTile
from outcore.stream.execute.tile_schedule import PassStep
from outcore.stream.network import has_channels_last
from outcore.stream.source import StreamedImage

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PixelLoss:
    """A loss that is a sum over pixels, or a mean with the same weight for each.

    >>> PixelLoss(torch.nn.functional.cross_entropy).reduction
    'mean'
    """

    function: Function
    """Of (output, target), both cut to the same pixels."""
    reduction: Literal["mean", "sum"] = "mean"
    """What the function does with its pixels; a mean must count every pixel alike (no ignored or weighted ones)."""

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise StreamError(f'reduction must be "mean" or "sum", not {self.reduction!r}')

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of a whole output."""
        return self.function(output, target)

    def term(self, output: torch.Tensor, target: torch.Tensor, share: float) -> torch.Tensor:
        """What some pixels add to the loss of all.

        Args:
            output: of these pixels.
            target: of the same.
            share: these pixels as a part of all.
        """
        loss = self.function(output, target)
        return loss * share if self.reduction == "mean" else loss


_MEANS: tuple[Any, ...] = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)
_MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)


def pixel_loss_of(loss: Any) -> PixelLoss | None:
    """A loss as one over pixels: a `PixelLoss`, or one of torch that counts every element alike; None for others.

    >>> pixel_loss_of(torch.nn.MSELoss(reduction="sum")).reduction, pixel_loss_of(torch.nn.CrossEntropyLoss())
    ('sum', None)
    """
    if isinstance(loss, PixelLoss):
        return loss
    if type(loss) in _MODULES and loss.reduction in ("mean", "sum"):
        alike = getattr(loss, "weight", None) is None and getattr(loss, "pos_weight", None) is None
        return PixelLoss(loss, loss.reduction) if alike else None
    known = any(loss is mean for mean in _MEANS)
    return PixelLoss(loss) if known else None


@dataclass
class _Pass:
    execution: Execution
    loss: PixelLoss
    target: StreamedImage
    gradients: bool

    def __post_init__(self) -> None:
        self.sums = GradientSums()
        self.total: torch.Tensor | None = None
        self.dtype = torch.float32
        """Of the loss."""
        (name,) = self.execution.streaming.boundary
        self.last = has_channels_last(self.execution.network.axes[name])

    def run(self, step: PassStep) -> None:
        """The last pass, forward and backward at once."""
        run, index = self.execution, step.index
        stage = run.streaming.stages[index]
        (name,) = run.streaming.boundary
        state = run.state_of(stage)
        waiting: dict[Hashable, tuple[StreamTile, PrefetchedPixels, int]] = {}

        def beside(plan: StreamTile) -> torch.Tensor:
            return self.target.read(target_region(self.target.shape, plan.targets[name], last=self.last))

        for plan, pixels in run.read(step, run.plans(step), beside):
            key = self._key(index, plan, pixels)
            if key is None:
                self._tile(index, plan, pixels, state, 1)
            else:
                times = waiting[key][2] if key in waiting else 0
                waiting[key] = (plan, pixels, times + 1)
        for plan, held, times in waiting.values():
            run.counts.reused += times - 1
            self._tile(index, plan, held, state, times)

    def _tile(
        self,
        index: int,
        plan: StreamTile,
        pixels: PrefetchedPixels,
        state: Mapping[Any, torch.Tensor],
        times: int,
    ) -> None:
        run, stage = self.execution, self.execution.streaming.stages[index]
        (name,) = run.streaming.boundary
        parameters = list({id(t): t for t in state.values() if t.requires_grad}.values())
        region = target_region(self.target.shape, plan.targets[name], last=self.last)
        assert pixels.beside is not None
        target = pixels.beside.to(run.device, non_blocking=True)
        with torch.set_grad_enabled(self.gradients):
            loaded = run.load(stage, plan, pixels)
            wanted = {n: c.requires_grad_() for n, c in loaded.items() if self.gradients and run.is_wanted(n)}
            made = run.compute(stage, plan, loaded, state)
            run.counts.forward += 1
            share = elements(region) / elements(tuple((0, n) for n in self.target.shape))
            loss = self.loss.term(made[name], self.target.prepare(target), share) * times
        part = loss.detach().double()
        self.total, self.dtype = part if self.total is None else self.total + part, loss.dtype
        if self.gradients and loss.requires_grad and (wanted or parameters):
            run.counts.backward += 1
            found = torch.autograd.grad(loss, [*wanted.values(), *parameters], allow_unused=True)
            for source, gradient in zip(wanted, found, strict=False):
                if gradient is not None:
                    run.store.add_gradient(source, run.network.shapes[source], plan.regions[source], gradient)
            self.sums.add(parameters, found[len(wanted) :])
            torch.clear_autocast_cache()

    def _key(self, index: int, plan: StreamTile, pixels: PrefetchedPixels) -> Any:
        run = self.execution
        key = run.duplicate_key(run.streaming.stages[index], plan, pixels)
        if key is None or pixels.beside is None:
            return None
        first = pixels.beside.flatten()[0]
        return (key, float(first)) if bool((pixels.beside == first).all()) else None


def target_region(shape: tuple[int, ...], out: Region, *, last: bool = False) -> Region:
    """The region of a target of some shape for a region of the output: its batch and pixels, and all channels of the
    target, if it has any, which are the last dimension where the output has them there."""
    pixels = len(out) - 2
    if last:
        return (*out[:-1], *((0, n) for n in shape[len(out) - 1 :]))
    middle = [(0, n) for n in shape[1 : len(shape) - pixels]]
    return (out[0], *middle, *out[2:])


def one_pass(
    execution: Execution, loss: PixelLoss, target: StreamedImage, *, gradients: bool
) -> tuple[torch.Tensor, GradientSums, dict[str, torch.Tensor]]:
    """The loss, the sums of the parameters' gradients and the gradients of the inputs that want one; of an execution
    that has some of the tiles, their terms."""
    (name,) = execution.streaming.boundary
    shape = execution.network.shapes[name]
    last = has_channels_last(execution.network.axes[name])
    pixels = shape[1:-1] if last else shape[2:]
    given = target.shape[1 : len(shape) - 1] if last else target.shape[2 - len(shape) :]
    if target.shape[0] != shape[0] or tuple(given) != pixels:
        raise StreamError(f"the target has shape {tuple(target.shape)}, but the output is {shape}; pixels must agree")
    dense = _Pass(execution, loss, target, gradients)
    dense.run(execution.run_before_last())
    if gradients:
        execution.send_back(dense.sums)
    total = dense.total if dense.total is not None else torch.zeros((), device=execution.device)
    inputs = {n: execution.store.gradients[n] for n in execution.wants if n in execution.store.gradients}
    return total.to(dense.dtype), dense.sums, inputs
