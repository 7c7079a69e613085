"""Norms: local where statistics are frozen or per pixel, by a barrier where they are over the image.

A norm over an image (batch norm in train mode, instance norm, group norm) is two things: statistics, a reduction that
needs all tiles, and their application, which is element-wise. The call becomes two nodes, with the finished statistics
as a small value between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outcore.graph.record.recording import Ref
from outcore.ops.region import Region, whole
from outcore.ops.registry import kinds
from outcore.stream.call import NotStreamable, PlainRule, RuleContext, StreamCall, rule
from outcore.stream.rules.reduce import Moments


@dataclass(frozen=True)
class Norm:
    """A norm with statistics over the image."""

    moments: Moments
    apply: Apply
    module: nn.Module | None
    """The batch norm whose running statistics are updated."""

    @property
    def operands(self) -> tuple[Ref, ...]:
        """As the call has them."""
        return self.apply.operands


@dataclass(frozen=True)
class _PerChannel(PlainRule):
    operands: tuple[Ref, ...]
    shapes: tuple[tuple[int, ...], ...]
    eps: float
    has_weight: bool
    has_bias: bool

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The same pixels of all channels; statistics and parameters whole."""
        first = (out[0], (0, self.shapes[0][1]), *out[2:])
        return (first, *(whole(s) for s in self.shapes[1:]))

    def follow(self, operand: int, dim: int) -> int | None:
        """Pixels stay; parameters are needed whole."""
        return dim if operand == 0 and dim != 1 else None

    def _affine(self, crops: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        left = list(crops)
        weight = left.pop(0) if self.has_weight else None
        return weight, left.pop(0) if self.has_bias else None

    @staticmethod
    def _channels(tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor.reshape(1, -1, *(1,) * (rank - 2))


@dataclass(frozen=True)
class Frozen(_PerChannel):
    """Batch norm with running statistics: one multiplication and one addition per element.

    torch's own backward for this case is slow on a GPU; the affine form is not, and differs by rounding alone.
    """

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """x * scale + shift."""
        return _scaled(crops[0], *self.scale_and_shift(*crops[1:]))

    def scale_and_shift(
        self, mean: torch.Tensor, variance: torch.Tensor, *affine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two numbers per channel."""
        weight, bias = self._affine(affine)
        precise = torch.float64 if mean.dtype == torch.float64 else torch.float32
        scale = (variance.to(precise) + self.eps).rsqrt()
        if weight is not None:
            scale = scale * weight
        shift = -mean * scale
        return scale, shift if bias is None else shift + bias


@dataclass(frozen=True)
class Affine(PlainRule):
    """A multiplication and an addition per channel, with finished factors."""

    operands: tuple[Ref, ...]
    shapes: tuple[tuple[int, ...], ...]

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The same pixels of all channels."""
        return ((out[0], (0, self.shapes[0][1]), *out[2:]), *(whole(s) for s in self.shapes[1:]))

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """x * scale + shift."""
        return _scaled(*crops)

    def follow(self, operand: int, dim: int) -> int | None:
        """Pixels stay."""
        return dim if operand == 0 and dim != 1 else None


def _scaled(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    view = (1, -1, *(1,) * (x.dim() - 2))
    return torch.addcmul(shift.to(x.dtype).reshape(view), x, scale.to(x.dtype).reshape(view))


@dataclass(frozen=True)
class Apply(_PerChannel):
    """Normalise by finished statistics (the second operand)."""

    groups: int

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """(x - mean) / deviation, then the affine part."""
        x, moments, *affine = crops
        weight, bias = self._affine(affine)
        batch, channels, rank = moments.shape[1], x.shape[1], x.dim()
        each = channels // self.groups
        mean, inverse = moments[0], (moments[1] + self.eps).rsqrt()
        mean = mean.repeat_interleave(each, -1) if each > 1 else mean
        inverse = inverse.repeat_interleave(each, -1) if each > 1 else inverse
        shape = (batch, channels, *(1,) * (rank - 2))
        if batch > 1:
            lo, hi = out[0]
            mean, inverse, shape = mean[lo:hi], inverse[lo:hi], (hi - lo, *shape[1:])
        made = (x.to(moments.dtype) - mean.reshape(shape)) * inverse.reshape(shape)
        if weight is not None:
            made = made * self._channels(weight.to(moments.dtype), rank)
        if bias is not None:
            made = made + self._channels(bias.to(moments.dtype), rank)
        return made.to(x.dtype)


@rule(*kinds("norm with statistics"), "group_norm")
def _norm(call: StreamCall) -> Frozen | Norm:
    if call.module is None:
        return _functional(call)
    m: Any = call.module
    source = call.input()
    weight, bias = call.state("weight"), call.state("bias")
    is_batch, is_group = call.operation.endswith("batch_norm"), call.operation == "group_norm"
    if not is_group and not m.training and m.running_mean is not None:
        return _frozen(call, source, call.state("running_mean"), call.state("running_var"), weight, bias, m.eps)
    if not is_batch and not is_group and m.track_running_stats:
        raise NotStreamable("an instance norm that keeps running statistics has no rule; build it without them")
    groups = m.num_groups if is_group else call.shapes(source)[1]
    return _by_barrier(call, source, weight, bias, m.eps, groups, is_batch, m if is_batch else None)


def _functional(call: StreamCall) -> Frozen | Norm:
    given = call.given()
    if call.operation == "batch_norm":
        if not given["training"]:
            mean, var = given["running_mean"], given["running_var"]
            return _frozen(call, given["input"], mean, var, given["weight"], given["bias"], given["eps"])
        raise NotStreamable("a functional batch norm in train mode has no rule; use torch.nn.BatchNorm2d")
    if given.get("running_mean") is not None:
        raise NotStreamable("an instance norm that keeps running statistics has no rule; build it without them")
    groups = given.get("num_groups") or call.shapes(given["input"])[1]
    return _by_barrier(call, given["input"], given["weight"], given["bias"], given["eps"], groups, False, None)


def _frozen(
    call: StreamCall, source: Ref, mean: Ref | None, var: Ref | None, weight: Ref | None, bias: Ref | None, eps: float
) -> Frozen:
    operands = tuple(r for r in (source, mean, var, weight, bias) if r is not None)
    shapes = tuple(call.shapes(r) for r in operands)
    return Frozen(operands, shapes, eps, weight is not None, bias is not None)


def _by_barrier(
    call: StreamCall,
    source: Ref,
    weight: Ref | None,
    bias: Ref | None,
    eps: float,
    groups: int,
    over_batch: bool,
    module: nn.Module | None,
) -> Norm:
    shape = call.shapes(source)
    moments = Moments((source,), shape, groups, over_batch, call.dtype)
    statistics = Ref("value", f"{call.name}:moments")
    operands = tuple(r for r in (source, statistics, weight, bias) if r is not None)
    shapes = (shape, (2, 1 if over_batch else shape[0], groups), *(call.shapes(r) for r in operands[2:]))
    apply = Apply(operands, shapes, eps, weight is not None, bias is not None, groups)
    return Norm(moments, apply, module)
