"""Norms and global pools over an image of which each rank holds a part.

Every rank takes the statistics of its own part; all of them are exchanged and merged in the order of ranks, so every
rank gets the same bits. Moments of parts are merged as in the tiles of a stream (Chan, Golub and LeVeque 1979). Of n
elements, with y = (x - mean) / deviation and g the gradient of y, the gradient of x is

    (g - (sum of g) / n - y (sum of g y) / n) / deviation

where the sums are over all ranks. The first term belongs to every copy of an element; the others come through the
statistics, and belong to the one copy that was counted, its owner's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outcore.ops.region import Region, elements
from outcore.spatial.communicator import Communicator, gather_rows
from outcore.spatial.exchange import Token
from outcore.stream.rules.border import sliced
from outcore.stream.rules.normalise import Apply
from outcore.stream.rules.reduce import Largest, Mean, Moments, wide

__all__ = ["Statistics", "largest", "normalise", "take_statistics", "total"]


@dataclass(frozen=True)
class Statistics:
    """Of a norm over the whole image."""

    moments: torch.Tensor
    """Mean and biased variance."""
    count: int
    """Elements that each was taken over."""


@torch.no_grad()
def take_statistics(
    moments: Moments,
    own: torch.Tensor | None,
    parts: list[Region | None],
    comm: Communicator,
    number: int,
    device: torch.device,
) -> Statistics:
    """Mean and variance over all parts, the same on every rank.

    Args:
        moments: what is taken.
        own: this rank's part.
        parts: those of all ranks.
        comm: the ranks.
        number: of the message.
        device: of this rank.
    """
    dtype = wide(moments.dtype)
    shape = (2, 1 if moments.over_batch else moments.shape[0], moments.groups)
    row = torch.zeros(shape, dtype=dtype, device=device)
    if own is not None:
        row = _moments(moments, own, dtype)
    each = moments.groups * (1 if moments.over_batch else moments.shape[0])
    seen, mean, spread = 0, torch.zeros_like(row[0]), torch.zeros_like(row[0])
    for part, theirs in zip(parts, gather_rows(comm, row, number), strict=True):
        if part is None:
            continue
        count = elements(part) // each
        both = seen + count
        apart = theirs[0] - mean
        mean = mean + apart * (count / both)
        spread = spread + theirs[1] + apart.square() * (seen * count / both)
        seen = both
    return Statistics(torch.stack([mean, spread / seen]), seen)


def _moments(moments: Moments, own: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Mean and sum of squared distances to it, of a part."""
    x = own.to(dtype)
    if moments.over_batch:
        dims = [d for d in range(x.dim()) if d != 1]
        mean, spread = _mean_and_spread(x, dims)
        return torch.stack([mean, spread]).unsqueeze(1)
    return torch.stack(_mean_and_spread(x.reshape(x.shape[0], moments.groups, -1), [-1]))


def _mean_and_spread(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    if x.device.type != "cpu":
        variance, mean = torch.var_mean(x, dims, correction=0)
        return mean, variance * (x.numel() // max(1, mean.numel()))
    # torch's own reduction to variances does not use vector instructions on a CPU: these take a tenth of its time.
    mean = x.mean(dims, keepdim=True)
    spread = (x - mean).square_().sum(dims)
    return mean.reshape(spread.shape), spread


def _summed(comm: Communicator, row: torch.Tensor, number: int) -> torch.Tensor:
    rows = gather_rows(comm, row, number)
    found = rows[0]
    for other in rows[1:]:
        found = found + other
    return found


@dataclass
class _NormCall:
    """One norm on one rank."""

    rule: Apply
    statistics: Statistics
    held: Region | None
    own: Region | None
    comm: Communicator
    number: int
    shape: tuple[int, ...]
    """Of the whole value."""

    def per_channel(self, statistic: torch.Tensor) -> torch.Tensor:
        """A row (batch or 1, groups) as something that multiplies what is held."""
        each = self.shape[1] // self.rule.groups
        found = statistic.repeat_interleave(each, -1) if each > 1 else statistic
        return found.reshape(*found.shape, *(1,) * (len(self.shape) - 2))

    def per_group(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows (batch, channels) added up over the channels of a group and, for a batch norm, over samples."""
        found = rows.reshape(rows.shape[0], self.rule.groups, -1).sum(-1)
        batch = self.statistics.moments.shape[1]
        return found.sum(0, keepdim=True) if batch == 1 and rows.shape[0] > 1 else found

    @property
    def scale(self) -> torch.Tensor:
        return self.per_channel((self.statistics.moments[1] + self.rule.eps).rsqrt())

    @property
    def mean(self) -> torch.Tensor:
        return self.per_channel(self.statistics.moments[0])

    @property
    def per_batch(self) -> bool:
        """Whether it is a norm of channels over all samples, for which torch has kernels that take statistics."""
        return self.statistics.moments.shape[1] == 1 and self.rule.groups == self.shape[1]

    def sums_with_gradient(self, x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the gradient over pixels, and of its product with what is normalised: (batch or 1, channels)."""
        dtype = self.statistics.moments.dtype
        if self.per_batch and x.dtype == gradient.dtype == dtype:
            mean, variance = self.statistics.moments[:, 0]
            none, wanted = torch.ones_like(mean), [False, True, True]
            _, with_normal, alone = torch.ops.aten.native_batch_norm_backward(
                gradient, x, none, None, None, mean, (variance + self.rule.eps).rsqrt(), True, self.rule.eps, wanted
            )
            return alone.unsqueeze(0), with_normal.unsqueeze(0)
        scale, got = self.scale, gradient.to(dtype)
        normal = torch.addcmul(-self.mean * scale, x.to(dtype), scale)
        return _per_sample(got), _per_sample(got * normal)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        token: Token | None,
        call: _NormCall,
    ) -> tuple[Any, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias)
        made = None
        if x is not None:
            made = normalised(x, weight, bias, call)
        return made, None if token is None else token.view(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        call: _NormCall = ctx.call
        moments, got = call.statistics.moments, gradients[0]
        none = torch.zeros((), device=moments.device)
        sums = torch.zeros_like(moments)
        of_weight = of_bias = None
        if x is not None and got is not None:
            alone, with_normal = call.sums_with_gradient(x, got)
            of_weight = None if weight is None else with_normal.sum(0).to(weight.dtype)
            of_bias = None if bias is None else alone.sum(0).to(bias.dtype)
            channels = 1.0 if weight is None else weight.to(moments.dtype)
            sums = torch.stack([call.per_group(alone * channels), call.per_group(with_normal * channels)])
        sums = _summed(call.comm, sums, call.number + 1) / call.statistics.count
        if x is None:
            return None, None, None, none, None
        scale = call.scale
        factor = scale if weight is None else scale * weight.to(moments.dtype).reshape(1, -1, *(1,) * (scale.dim() - 2))
        back = torch.zeros_like(x, dtype=moments.dtype) if got is None else got.to(moments.dtype) * factor
        if call.own is not None:
            assert call.held is not None
            # What comes through the statistics: (sums[0] + normal * sums[1]) * scale, with normal = (x - mean) * scale.
            slope = call.per_channel(sums[1]) * scale * scale
            offset = call.per_channel(sums[0]) * scale - call.mean * slope
            mine, theirs = sliced(back, call.held, call.own), sliced(x, call.held, call.own)
            mine.sub_(torch.addcmul(offset, theirs.to(moments.dtype), slope))
        return back.to(x.dtype), of_weight, of_bias, none, None


def _per_sample(x: torch.Tensor) -> torch.Tensor:
    """Sums over pixels: (batch, channels)."""
    return x.sum(list(range(2, x.dim()))) if x.dim() > 2 else x


def normalised(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, call: _NormCall
) -> torch.Tensor:
    """One multiplication and one addition per element."""
    dtype = call.statistics.moments.dtype
    if call.per_batch and x.dtype == dtype:
        mean, variance = call.statistics.moments[:, 0]
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, call.rule.eps, True)
    view = (1, -1, *(1,) * (x.dim() - 2))
    scale = call.scale if weight is None else call.scale * weight.to(dtype).reshape(view)
    shift = -call.mean * scale
    shift = shift if bias is None else shift + bias.to(dtype).reshape(view)
    return torch.addcmul(shift, x.to(dtype), scale).to(x.dtype)


def normalise(
    x: torch.Tensor | None,
    affine: list[torch.Tensor],
    rule: Apply,
    statistics: Statistics,
    held: Region | None,
    own: Region | None,
    shape: tuple[int, ...],
    comm: Communicator,
    number: int,
    token: Token | None,
) -> tuple[torch.Tensor | None, Token | None]:
    """Normalise what a rank holds by finished statistics, with the gradient that also goes through them.

    Args:
        x: what is held; None for nothing, and this rank only adds up with the others.
        affine: weight and bias, as far as the rule has them.
        rule: the norm.
        statistics: over the whole image.
        held: the region of x.
        own: this rank's part of it, which its statistics were taken over.
        shape: of the whole value.
        comm: the ranks.
        number: of the messages.
        token: the chain of communicating nodes; None without gradients.
    """
    left = list(affine)
    weight = left.pop(0) if rule.has_weight else None
    bias = left.pop(0) if rule.has_bias else None
    call = _NormCall(rule, statistics, held, own, comm, number, shape)
    if token is None:
        return None if x is None else normalised(x, weight, bias, call), None
    made, token = _Normalise.apply(x, weight, bias, token, call)  # type: ignore[no-untyped-call]
    return made, token


class _Total(torch.autograd.Function):
    """A sum over all parts; its gradient is the sum of what all ranks have of it."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor | None, token: Token, shape: Any, comm: Any, number: int) -> Any:
        ctx.comm, ctx.number, ctx.shape, ctx.given = comm, number, shape, part is not None
        ctx.dtype, ctx.device = shape.dtype, shape.device
        row = torch.zeros_like(shape) if part is None else part
        return _summed(comm, row, number), token.view(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        got = _summed(ctx.comm, gradients[0], ctx.number + 1)
        return got if ctx.given else None, torch.zeros((), device=ctx.device), None, None, None


def total(
    mean: Mean,
    own: torch.Tensor | None,
    result: torch.Tensor,
    comm: Communicator,
    number: int,
    token: Token | None,
) -> tuple[torch.Tensor, Token | None]:
    """A mean or sum over all parts; `result` has the shape and dtype in which parts are added."""
    part = None if own is None else own.sum(mean.dims, keepdim=mean.keepdim, dtype=result.dtype)
    if token is None:
        return mean.finish(_summed(comm, torch.zeros_like(result) if part is None else part, number)), None
    summed, token = _Total.apply(part, token, result, comm, number)  # type: ignore[no-untyped-call]
    return mean.finish(summed), token


class _Largest(torch.autograd.Function):
    """The largest of all parts; of equal ones the first rank's gets the gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor | None, token: Token, shape: Any, comm: Any, number: int) -> Any:
        row = torch.full_like(shape, float("-inf")) if part is None else part
        rows = torch.stack(gather_rows(comm, row, number))
        value = rows.amax(0)
        first = (rows == value).to(torch.uint8).argmax(0)
        ctx.mine, ctx.comm, ctx.number, ctx.given = first == comm.rank, comm, number, part is not None
        return value, token.view(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        got = _summed(ctx.comm, gradients[0], ctx.number + 1)
        back = torch.where(ctx.mine, got, torch.zeros_like(got)) if ctx.given else None
        return back, torch.zeros((), device=gradients[0].device), None, None, None


def largest(
    rule: Largest, own: torch.Tensor | None, result: torch.Tensor, comm: Communicator, number: int, token: Token | None
) -> tuple[torch.Tensor, Token | None]:
    """A maximum over all parts; `result` has its shape and dtype."""
    at = () if own is None else tuple((0, n) for n in own.shape)
    part = None if own is None else rule.finish(rule.add(None, own, at, 1))
    if token is None:
        row = torch.full_like(result, float("-inf")) if part is None else part
        return torch.stack(gather_rows(comm, row, number)).amax(0), None
    found, token = _Largest.apply(part, token, result, comm, number)  # type: ignore[no-untyped-call]
    return found, token
