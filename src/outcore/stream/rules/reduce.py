"""Global reductions, as sums of terms that tiles give one by one.

A mean or a variance over an image needs all of it, but can be *accumulated*: pass one adds up what each tile has, pass
two sends each tile its share of the gradient. `share` is the tile's term of a sum whose derivative is that of the
reduction, given the finished result: for a mean the tile's sum over n, for a variance the tile's sum of squared
distances to the finished mean over n (the derivative through the mean vanishes, for the distances add up to zero).
Moments of parts are merged as Chan, Golub and LeVeque do (1979), which is as stable as two passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from outcore.graph.record.recording import Ref
from outcore.ops.region import Region
from outcore.stream.call import NotStreamable, RegionRule, StreamCall, rule
from outcore.stream.rules.along_dims import Along


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision to add up in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Mean:
    """Mean (or sum) over some dimensions."""

    operands: tuple[Ref, ...]
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    keepdim: bool
    dtype: torch.dtype
    total: bool = False
    """The sum, not the mean."""

    def start(self) -> Any:
        """The state before any tile."""
        return None

    def add(self, state: Any, crop: torch.Tensor, at: Region, times: int) -> Any:
        """Add a tile's sum."""
        part = crop.sum(self.dims, keepdim=self.keepdim, dtype=wide(crop.dtype))
        part = part * times if times != 1 else part
        return part if state is None else state + part

    def finish(self, state: Any) -> torch.Tensor:
        """The sum over the number of elements."""
        done: torch.Tensor = (state / self._count()).to(self.dtype)
        return done

    def share(self, crop: torch.Tensor, at: Region, result: torch.Tensor, state: Any, times: int) -> torch.Tensor:
        """The tile's part of the mean."""
        part = crop.sum(self.dims, keepdim=self.keepdim, dtype=wide(crop.dtype)) * (times / self._count())
        return part.to(self.dtype)

    def _count(self) -> int:
        return 1 if self.total else math.prod(self.shape[d] for d in self.dims)


@dataclass(frozen=True)
class Largest:
    """Maximum over some dimensions; of equal ones the first tile's gets the gradient."""

    operands: tuple[Ref, ...]
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    keepdim: bool
    dtype: torch.dtype

    def start(self) -> Any:
        """The state before any tile."""
        return None

    def add(self, state: Any, crop: torch.Tensor, at: Region, times: int) -> Any:
        """The larger of both, and its position."""
        flat = self._flat(crop)
        value, index = flat.max(-1)
        corner = torch.tensor([a for a, _ in at], device=crop.device)
        where = corner.expand(*value.shape, -1)
        if state is None:
            return value, index, where
        more = value > state[0]
        return (
            torch.where(more, value, state[0]),
            torch.where(more, index, state[1]),
            torch.where(more.unsqueeze(-1), where, state[2]),
        )

    def finish(self, state: Any) -> torch.Tensor:
        """The largest."""
        value: torch.Tensor = state[0].to(self.dtype)
        return value.reshape(self._result_shape(value))

    def share(self, crop: torch.Tensor, at: Region, result: torch.Tensor, state: Any, times: int) -> torch.Tensor:
        """The element itself, in the tile it lies in; nothing elsewhere."""
        flat = self._flat(crop)
        _, index, where = state
        corner = torch.tensor([a for a, _ in at], device=crop.device)
        mine = (where == corner).all(-1)
        value = flat.gather(-1, torch.where(mine, index, 0).unsqueeze(-1)).squeeze(-1)
        value = torch.where(mine, value, torch.zeros_like(value)).to(self.dtype)
        return value.reshape(self._result_shape(value))

    def _flat(self, crop: torch.Tensor) -> torch.Tensor:
        kept = [d for d in range(crop.dim()) if d not in self.dims]
        return crop.permute(*kept, *self.dims).flatten(len(kept))

    def _result_shape(self, value: torch.Tensor) -> tuple[int, ...]:
        if not self.keepdim:
            return tuple(value.shape)
        return tuple(1 if d in self.dims else n for d, n in enumerate(self.shape))


@dataclass(frozen=True)
class Moments:
    """Mean and variance over an image, per channel (batch norm), group or instance: stacked as (2, ...)."""

    operands: tuple[Ref, ...]
    shape: tuple[int, ...]
    groups: int
    """The number of groups of channels."""
    over_batch: bool
    dtype: torch.dtype

    def start(self) -> Any:
        """The state before any tile."""
        return None

    def grouped(self, crop: torch.Tensor) -> torch.Tensor:
        """The crop as (batch or 1, groups, elements)."""
        if self.over_batch:
            return crop.transpose(0, 1).reshape(1, self.groups, -1)
        return crop.reshape(crop.shape[0], self.groups, -1)

    def add(self, state: Any, crop: torch.Tensor, at: Region, times: int) -> Any:
        """Merge the moments so far with those of a tile."""
        x = self.grouped(crop).to(wide(crop.dtype))
        count = x.shape[-1] * times
        mean = x.mean(-1)
        spread = (x - mean.unsqueeze(-1)).square().sum(-1) * times
        if state is None:
            return count, mean, spread
        seen, old, old_spread = state
        apart = mean - old
        both = seen + count
        return (
            both,
            old + apart * (count / both),
            old_spread + spread + apart.square() * (seen * count / both),
        )

    def finish(self, state: Any) -> torch.Tensor:
        """Mean and biased variance."""
        count, mean, spread = state
        return torch.stack([mean, spread / count])

    def share(self, crop: torch.Tensor, at: Region, result: torch.Tensor, state: Any, times: int) -> torch.Tensor:
        """The tile's terms, given the finished mean."""
        x = self.grouped(crop).to(result.dtype)
        count: int = state[0]
        return torch.stack([x.sum(-1), (x - result[0].unsqueeze(-1)).square().sum(-1)]) * (times / count)


@rule("mean", "sum")
def _reduction(call: StreamCall) -> RegionRule | Mean:
    given = call.bound("input dim keepdim", dim=None, keepdim=False)
    source, dims = given["input"], given["dim"]
    shape = call.shapes(source)
    if dims is None or dims == () or dims == []:
        dims = tuple(range(len(shape)))
    dims = tuple(d % len(shape) for d in ((dims,) if isinstance(dims, int) else dims))
    if not call.streamed(source) & set(dims):
        return Along((source,), shape, dims, given["keepdim"], call.recall())
    if left := call.streamed(source) - set(dims):
        raise NotStreamable(f"it reduces some dimensions of the image and leaves dimension {min(left)}")
    if given.get("dtype") is not None:
        raise NotStreamable(f"{call.type} into another dtype has no rule")
    return Mean((source,), shape, dims, given["keepdim"], call.dtype, total=call.type == "sum")
