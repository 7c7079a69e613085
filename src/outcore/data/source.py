"""A tensor that is read where it is needed: what a network's input is when it does not fit in memory.

A *source* has the ``shape`` and ``dtype`` of a tensor and gives any box of it on demand. Streaming asks for the boxes
its tiles depend on; a slide, a memory map, a volume in chunks and a tensor in memory all answer the same way:

    source.shape                         (3, 100000, 100000)
    source.dtype                         torch.uint8
    source.read([(0, 3), (0, 512), (512, 1024)])   a tensor of 3 x 512 x 512

A region is one ``(start, stop)`` pair or one slice without step for each dimension. Invariants: what is read does not
depend on how the reads were cut (two reads that overlap agree bitwise on the overlap), the tensor is the caller's own,
and reads may come from many threads at once. A source may also have ``colour(region)``: the one number of each
channel all over a box, where it knows that without reading; None where it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from outcore.errors import DataError
from outcore.machine.units import counted

Span = tuple[int, int]
Region = Sequence["Span | slice"]


@runtime_checkable
class Source(Protocol):
    """A lazy tensor; see the module."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size in every dimension."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what is read."""

    def read(self, region: Region) -> Tensor:
        """The values of one box, as a tensor of the caller's own; may be called from any thread."""


def spans(region: Region, shape: Sequence[int]) -> tuple[Span, ...]:
    """A region as pairs, checked against a shape.

    >>> spans([(0, 2), slice(1, None)], (3, 5))
    ((0, 2), (1, 5))
    """
    if len(region) != len(shape):
        raise DataError(f"a region of {len(region)} dimensions was asked of a source of shape {_times(shape)}")
    checked = []
    for dim, (span, size) in enumerate(zip(region, shape, strict=True)):
        if isinstance(span, slice):
            start, stop, step = span.indices(size)
        else:
            (start, stop), step = span, 1
        if step != 1 or not 0 <= start <= stop <= size:
            raise DataError(f"{start}:{stop} in dimension {dim} does not lie in a source of shape {_times(shape)}")
        checked.append((start, stop))
    return tuple(checked)


@dataclass(frozen=True)
class ArraySource:
    """An array in memory or in a memory map, as a source.

    >>> ArraySource(torch.arange(12).reshape(3, 4)).read([(1, 2), (0, 2)])
    tensor([[4, 5]])
    """

    array: Tensor | np.ndarray[Any, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size in every dimension."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what is read."""
        array = self.array
        return array.dtype if isinstance(array, Tensor) else torch.from_numpy(np.empty(0, array.dtype)).dtype

    def read(self, region: Region) -> Tensor:
        """A copy of one box."""
        box = self.array[tuple(slice(*span) for span in spans(region, self.shape))]
        return box.clone() if isinstance(box, Tensor) else torch.from_numpy(np.array(box))


@dataclass(frozen=True)
class Batch:
    """Sources of one shape as the input of a network: a batch of floating-point images, still lazy.

    `read` gives the values as they are stored (bytes stay bytes until they are on the device); `prepare` makes them
    ``(x / scale - mean) / std``, the last two by channel. The scale is 255 for bytes, 65535 for 16-bit integers, and 1
    for floating-point numbers, unless said. `tensor` does both for the whole batch.

    >>> images = Batch((ArraySource(torch.full((3, 4, 4), 51, dtype=torch.uint8)),))
    >>> images.shape, images.read([(0, 1), (0, 3), (0, 1), (0, 1)]).flatten().tolist()
    ((1, 3, 4, 4), [51, 51, 51])
    >>> images.tensor()[0, 0, 0, 0].item()
    0.20000000298023224
    """

    sources: tuple[Source, ...]
    dtype: torch.dtype = torch.float32
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    scale: float | None = None

    def __post_init__(self) -> None:
        shapes = {tuple(source.shape) for source in self.sources}
        if len(shapes) != 1:
            found = ", ".join(sorted(map(_times, shapes))) or "none"
            raise DataError(f"a batch needs images of one shape; given {found}; use --batch 1 or crop them")
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if numbers and len(numbers) != self.shape[1]:
                raise DataError(
                    f"{name} has {len(numbers)} numbers; the images have {counted(self.shape[1], 'channel')}"
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """Images, channels, and the size of an image."""
        return (len(self.sources), *self.sources[0].shape)

    def read(self, region: Region) -> Tensor:
        """One box of the batch, as stored."""
        (first, last), *rest = spans(region, self.shape)
        if first == last:
            return torch.empty((0, *(b - a for a, b in rest)), dtype=self.sources[0].dtype, device="cpu")
        boxes = [source.read(rest) for source in self.sources[first:last]]
        return torch.stack(boxes) if len(boxes) > 1 else boxes[0].unsqueeze(0)

    def colour(self, region: Region) -> tuple[int | float, ...] | None:
        """The numbers that each channel of each image has all over a box, where sources know that without reading."""
        (first, last), *rest = spans(region, self.shape)
        found: list[int | float] = []
        for source in self.sources[first:last]:
            known = getattr(source, "colour", None)
            if known is None or (colour := known(rest)) is None:
                return None
            found += colour
        return tuple(found)

    def prepare(self, crop: Tensor) -> Tensor:
        """A box of all channels, on any device, as the network sees it."""
        scale = self.scale or {torch.uint8: 255.0, torch.uint16: 65535.0}.get(crop.dtype, 1.0)
        values = crop.to(self.dtype, copy=True)
        if scale != 1.0:
            values /= scale
        for numbers, apply in ((self.mean, values.sub_), (self.std, values.div_)):
            if numbers:
                by_channel = torch.tensor(numbers, dtype=self.dtype, device=crop.device)
                apply(by_channel.reshape(1, -1, *(1 for _ in crop.shape[2:])))
        return values

    def tensor(self) -> Tensor:
        """The whole batch, in memory."""
        return self.prepare(self.read([(0, n) for n in self.shape]))


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
