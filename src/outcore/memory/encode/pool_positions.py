"""Positions in the window of a pool, one byte instead of an index of eight.

A maximum lies in its window, with one exception: on a GPU with channels last, torch names the image's first pixel where
it has found nothing above minus infinity, wherever the window is. That has a code of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outcore.kernels.pool_window import NOWHERE, PoolWindow
from outcore.ops.recompute_encode import POOLS
from outcore.ops.registry import spatial_dims

_CHUNK = 2**14
"""Elements that are encoded at a time, to limit temporary memory."""


def window_of(call: Any, image: Sequence[int]) -> PoolWindow | None:
    """The window of a max pool, from the module or the arguments of the function."""
    dims = len(image)

    def wide(value: Any) -> tuple[int, ...]:
        given = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
        return given * dims if len(given) == 1 else given

    kernel = wide(call["kernel_size"])
    stride = wide(call["stride"]) if call.get("stride") not in (None, ()) else kernel
    return PoolWindow(kernel, stride, wide(call.get("padding", 0)), wide(call.get("dilation", 1)), tuple(image))


def window_of_call(
    name: str, module: nn.Module | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> PoolWindow | None:
    """The window of a max pool that is being called; None if the call is something else, or not one of images.

    Args:
        name: of the function or the type of the module.
        module: that is called, if it is one.
        args: of the call.
        kwargs: of the call.
    """
    if name not in POOLS or not args or not isinstance(args[0], torch.Tensor):
        return None
    dims = spatial_dims(name)
    if args[0].dim() < dims:
        return None
    if module is not None:
        settings = {n: getattr(module, n) for n in ("kernel_size", "stride", "padding", "dilation")}
    else:
        settings = dict(zip(("kernel_size", "stride", "padding", "dilation"), args[1:5], strict=False)) | dict(kwargs)
    window = window_of(settings, args[0].shape[-dims:])
    return window if window is not None and window.fits else None


def positions_of(indices: torch.Tensor, window: PoolWindow) -> torch.Tensor:
    """The position of each maximum in its window."""
    small = torch.empty_like(indices, dtype=torch.uint8)
    if indices.is_cuda:
        from outcore.kernels.bitmask import to_positions

        to_positions(indices, small, window)
        return small
    for index, position in _rows(indices, small, window):
        rest, code, radix = index, torch.zeros((), dtype=torch.int64, device="cpu"), 1
        outside = torch.zeros((), dtype=torch.bool, device="cpu")
        for dim in reversed(range(len(window.image))):
            size = window.image[dim]
            at, rest = rest % size, torch.div(rest, size, rounding_mode="floor")
            origin = _origin(indices, window, dim)
            offset = (at - origin) // window.dilation[dim]
            code, radix = code + offset * radix, radix * window.kernel[dim]
            outside = outside | (origin > 0) | (origin % window.dilation[dim] != 0)
        position.copy_(torch.where(outside & (index == 0), NOWHERE, code))
    return small


def indices_of(positions: torch.Tensor, window: PoolWindow) -> torch.Tensor:
    """The index in the image of each position in its window."""
    whole = torch.empty_like(positions, dtype=torch.int64)
    if positions.is_cuda:
        from outcore.kernels.bitmask import to_indices

        to_indices(positions, whole, window)
        return whole
    for position, index in _rows(positions, whole, window):
        rest = position.to(torch.int64)
        found, scale = torch.zeros((), dtype=torch.int64, device="cpu"), 1
        for dim in reversed(range(len(window.image))):
            kernel = window.kernel[dim]
            offset, rest = rest % kernel, torch.div(rest, kernel, rounding_mode="floor")
            found = found + (_origin(positions, window, dim) + offset * window.dilation[dim]) * scale
            scale *= window.image[dim]
        index.copy_(torch.where(position == NOWHERE, 0, found))
    return whole


def _rows(a: torch.Tensor, b: torch.Tensor, window: PoolWindow) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors image by image, a few channels at a time, to limit temporary memory."""
    if a.dim() <= len(window.image) + 1:
        yield a, b
        return
    step = max(1, _CHUNK // max(1, math.prod(a.shape[2:])))
    for image in range(a.shape[0]):
        for start in range(0, a.shape[1], step):
            yield a[image, start : start + step], b[image, start : start + step]


def _origin(like: torch.Tensor, window: PoolWindow, dim: int) -> torch.Tensor:
    """Where the window of each output begins, along one dimension, shaped to broadcast."""
    dims = len(window.image)
    size = like.shape[like.dim() - dims + dim]
    origin = torch.arange(size, device=like.device) * window.stride[dim] - window.padding[dim]
    return origin.view(-1, *[1] * (dims - 1 - dim))
