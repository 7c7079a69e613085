"""Operations that can be done to the rows of a lazy tensor one by one: views of rows, casts, pointwise ones, softmax.

A lazy tensor has one *column dimension*, that of the layer's features, and rows in some arrangement over all others.
Every operation here is known in two forms: as the user has called it, and on a chunk of rows, which is a matrix with
the columns last. Views that rearrange rows, or leave some out, do nothing to a chunk; they say which rows it is of.
What is not known here, or mixes rows, is no row operation, and then the tensor is made whole.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from outcore.planner.memory.row_wise import (
    ACTIVATIONS,
    CASTS,
    INDEXING,
    PERMUTING,
    RESHAPING,
    ROW_WISE,
    SCALING,
    SOFTMAX,
)


@dataclass(frozen=True)
class RowLayout:
    """Which rows of a layer's result a tensor has, and where."""

    index: torch.Tensor | None
    """Number of the row at every place; none for all of them in order."""
    leading: tuple[int, ...]
    """Shape without the columns."""
    dim: int
    """The dimension of the columns."""

    @property
    def count(self) -> int:
        """Number of rows."""
        return math.prod(self.leading)

    def indices(self) -> torch.Tensor:
        """Number of the row at every place."""
        if self.index is not None:
            return self.index
        return torch.arange(self.count, device="cpu").view(self.leading)

    def columns_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same arrangement, as a matrix of rows."""
        return tensor.movedim(self.dim, -1).reshape(self.count, -1)


@dataclass(frozen=True)
class RowOp:
    """One operation, as it was called and as it is done to a chunk."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    """Without the tensor itself, which comes first."""
    kwargs: dict[str, Any]
    layout: RowLayout
    """Of the result."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_view: bool
    """Whether the result shares memory with what it is made of."""
    autocast: AutocastState
    on_chunk: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, repr=False)
    """None where a chunk stays as it is."""
    detaches: bool = False
    same: bool = False
    """Whether it returns the very tensor that it is given."""

    def as_called(self, tensor: torch.Tensor) -> torch.Tensor:
        """Apply the operation to the whole tensor, with the arguments and autocast of the user's call."""
        with self.autocast.restored():
            result: torch.Tensor = self.func(tensor, *self.args, **self.kwargs)
            return result

    def to_chunk(self, chunk: torch.Tensor) -> torch.Tensor:
        """Apply the operation to a chunk of rows, under the autocast of the user's call."""
        if self.on_chunk is None:
            return chunk
        with self.autocast.restored():
            return self.on_chunk(chunk)


def row_op(
    name: str, func: Callable[..., Any], tensor: torch.Tensor, layout: RowLayout, args: tuple[Any, ...], kwargs: Any
) -> RowOp | None:
    """What a call does to a lazy tensor of that layout, if it is a row operation."""
    if name not in ROW_WISE or _has_tensor(args) or _has_tensor(kwargs.values()):
        return None
    with _disable_current_modes():  # who counts memory must not count what has none
        return _row_op(name, func, tensor, layout, args, kwargs)


def _row_op(
    name: str, func: Callable[..., Any], tensor: torch.Tensor, layout: RowLayout, args: tuple[Any, ...], kwargs: Any
) -> RowOp | None:
    # On the meta device: shapes, strides and whether memory is shared, without computing anything.
    like = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")
    on_chunk, after, dtype = None, layout, tensor.dtype
    if name in CASTS:
        if not _casts_only(name, args, kwargs, tensor.device):
            return None
        wanted = func(torch.empty(1, dtype=tensor.dtype, device="cpu"), *args, **kwargs).dtype
        if not wanted.is_floating_point:
            return None
        made = func(like, *args, **_on_meta(kwargs)) if "device" not in kwargs else like.to(wanted)
        dtype, on_chunk = wanted, lambda chunk: chunk.to(wanted)
    elif name in ACTIVATIONS or (name in SCALING and _scales(args, kwargs)) or name in SOFTMAX:
        if kwargs.get("inplace") or kwargs.get("out") is not None:
            return None
        if name in SOFTMAX:
            if _softmax_dim(like, args, kwargs) != layout.dim:
                return None
            call = getattr(torch, name)
            to = kwargs.get("dtype")
            on_chunk = lambda chunk: call(chunk, -1, dtype=to)  # noqa: E731
        else:
            on_chunk = lambda chunk: func(chunk, *args, **kwargs)  # noqa: E731
        with torch.no_grad():
            dtype = on_chunk(torch.zeros(1, 2, dtype=tensor.dtype, device=tensor.device)).dtype
        made = torch.empty_like(like, dtype=dtype)
    elif name == "detach":
        made = like.detach()
    elif name in (*RESHAPING, *PERMUTING, *INDEXING):
        made = func(like, *args, **kwargs)
        if not isinstance(made, torch.Tensor) or made.dtype != dtype:
            return None
        found = _arranged(name, func, layout, like, made, args, kwargs)
        if found is None:
            return None
        after = found
    else:
        return None
    if not dtype.is_floating_point:
        return None
    return RowOp(
        func,
        args,
        dict(kwargs),
        after,
        tuple(made.shape),
        made.stride(),
        dtype,
        is_view=made is like or made._is_view() or name == "detach",
        autocast=AutocastState.of(tensor.device),
        on_chunk=on_chunk,
        detaches=name == "detach",
        same=made is like,
    )


def _has_tensor(values: Any) -> bool:
    return any(isinstance(v, torch.Tensor) or (isinstance(v, (tuple, list)) and _has_tensor(v)) for v in values)


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "device"}


def _casts_only(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> bool:
    """Whether a cast stays on its device, in its memory format."""
    if kwargs.get("memory_format") or kwargs.get("copy"):
        return False
    if name == "type":
        return len(args) == 1 and isinstance(args[0], torch.dtype)
    if name != "to":
        return not args
    where = kwargs.get("device")
    if where is not None and torch.device(where) != device:
        return False
    return all(isinstance(a, (torch.dtype, bool)) for a in args) and len(args) <= 2 and True not in args[2:]


def _scales(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the other operand is one number."""
    return len(args) == 1 and isinstance(args[0], (int, float)) and not set(kwargs) - {"alpha", "rounding_mode"}


def _softmax_dim(like: torch.Tensor, args: tuple[Any, ...], kwargs: Any) -> int | None:
    dim = kwargs.get("dim", args[0] if args else None)
    if not isinstance(dim, int) or len(args) > 1 or set(kwargs) - {"dim", "dtype", "_stacklevel"}:
        return None
    return dim % like.dim()


def _arranged(
    name: str,
    func: Callable[..., Any],
    layout: RowLayout,
    like: torch.Tensor,
    made: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: Any,
) -> RowLayout | None:
    """The rows after a view, if every row is still whole."""
    columns = like.shape[layout.dim]
    if columns < 2 or not made.dim():
        return None
    if made is like:
        return layout
    if name in RESHAPING:
        if layout.dim != like.dim() - 1 or made.shape[-1] != columns or made.numel() != like.numel():
            return None
        leading = tuple(made.shape[:-1])
        index = layout.index.reshape(leading) if layout.index is not None else None
        return RowLayout(index, leading, len(leading))
    if name in INDEXING:
        found = _columns_after(name, layout.dim, like.dim(), args, kwargs)
        if found is None:
            return None
        dim = found
    else:
        sizes = [2] * like.dim()
        sizes[layout.dim] = 3  # where the columns go
        dim = list(func(torch.empty(sizes, device="meta"), *args, **kwargs).shape).index(3)
    index = func(layout.indices().unsqueeze(layout.dim), *args, **kwargs)
    if index.dim() != made.dim() or index.shape[dim] != 1 or made.shape[dim] != columns:
        return None
    leading = tuple(index.squeeze(dim).shape)
    return RowLayout(index.squeeze(dim), leading, dim)


def _columns_after(name: str, dim: int, dims: int, args: tuple[Any, ...], kwargs: Any) -> int | None:
    """The dimension of the columns after an indexing; none if it is indexed itself."""
    if name == "getitem":
        return _position(args[0], dim, dims)
    given = kwargs.get("dim", args[0] if args else None)
    if not isinstance(given, int) or given % dims == dim:
        return None
    return dim - 1 if name == "select" and given % dims < dim else dim


def _position(key: Any, dim: int, dims: int) -> int | None:
    """Where a dimension goes under numbers, slices, new dimensions and an ellipsis; none if it is indexed itself."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(not (k is None or k is Ellipsis or isinstance(k, (int, slice))) or isinstance(k, bool) for k in keys):
        return None
    used = sum(k is not None and k is not Ellipsis for k in keys)
    if keys.count(Ellipsis) > 1 or used > dims:
        return None
    rest: list[Any] = [slice(None)] * (dims - used)
    at = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
    keys[at : at + 1] = rest
    source = place = 0
    for k in keys:
        if k is None:
            place += 1
            continue
        if source == dim:
            return place if k == slice(None) else None
        source += 1
        place += not isinstance(k, int)
    return None


@dataclass(frozen=True, slots=True)
class AutocastState:
    """Whether autocast was on for a device, and in which type."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, device: torch.device) -> AutocastState:
        """The state that is in force now."""
        kind = device.type
        if kind == "meta":
            return cls(kind, False, torch.float32)
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def restored(self) -> contextlib.AbstractContextManager[object]:
        """The same state again, without its cache of casts: what it would hold is gone."""
        if self.device == "meta":
            return contextlib.nullcontext()
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)
