"""Images that need not be in memory, as tiles see them.

Anything with ``shape``, ``dtype`` and ``read(region)`` is a source (`outcore.data.Source`): a slide, a memory map, a
function. Tiles ask for regions from worker threads, ahead of the compute and in any order. What is read is copied to
the device as it is stored (bytes stay bytes, a quarter of what floats would take) and converted to the model's dtype
there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outcore.data import Source
from outcore.errors import StreamError
from outcore.ops.region import Region, sizes
from outcore.stream.execute.map_store import cut


class StreamedImage(Protocol):
    """A streamed input: read raw on the host, prepared on the device."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As the model sees it: (batch, channels, pixels...)."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what the model sees."""

    def read(self, region: Region) -> torch.Tensor:
        """A region as it is stored; called from any thread."""

    def colour(self, region: Region) -> Hashable | None:
        """The values of a region that is the same at every pixel, where that is known without reading."""

    def prepare(self, crop: torch.Tensor) -> torch.Tensor:
        """What was read, now on the device, as the model sees it."""


@dataclass(frozen=True)
class FunctionSource:
    """A function of the region, as a source.

    >>> image = FunctionSource((1, 3, 10**5, 10**5), lambda region: torch.rand([b - a for a, b in region]))
    >>> image.read(((0, 1), (0, 3), (0, 4), (99_996, 10**5))).shape
    torch.Size([1, 3, 4, 4])
    """

    shape: tuple[int, ...]
    function: Callable[[Region], torch.Tensor]
    dtype: torch.dtype = torch.float32

    def read(self, region: Sequence[Any]) -> torch.Tensor:
        """What the function gives, checked."""
        crop = self.function(tuple(region))
        if tuple(crop.shape) != sizes(tuple(region)):
            raise StreamError(f"the source returned shape {tuple(crop.shape)} for a region of {sizes(tuple(region))}")
        return crop


@dataclass(frozen=True)
class _Tensor:
    """A tensor, on any device."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, region: Region) -> torch.Tensor:
        return cut(self.tensor, region)

    def colour(self, region: Region) -> Hashable | None:
        return None

    def prepare(self, crop: torch.Tensor) -> torch.Tensor:
        return crop


@dataclass(frozen=True)
class _Lazy:
    """A source; what it reads may still have to be prepared (a batch of bytes, see `outcore.data.Batch`)."""

    source: Source

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def read(self, region: Region) -> torch.Tensor:
        return self.source.read(region)

    def colour(self, region: Region) -> Hashable | None:
        known = getattr(self.source, "colour", None)
        found: Hashable | None = None if known is None else known(region)
        return found

    def prepare(self, crop: torch.Tensor) -> torch.Tensor:
        prepare = getattr(self.source, "prepare", None)
        made: torch.Tensor = crop if prepare is None else prepare(crop)
        return made


@dataclass(frozen=True)
class ImageRows:
    """Some samples of a streamed image, of which regions are brought to a device."""

    image: StreamedImage
    first: int
    last: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of these samples."""
        return (self.last - self.first, *self.image.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what the model sees."""
        return self.image.dtype

    def read(self, region: Region) -> torch.Tensor:
        """A region of them, as it is stored; nothing else is read."""
        (a, b), *rest = region
        return self.image.read(((self.first + a, self.first + b), *rest))

    def prepare(self, crop: torch.Tensor) -> torch.Tensor:
        """What was read, as the model sees it."""
        return self.image.prepare(crop).to(self.dtype)

    def part(self, region: Region, device: torch.device) -> torch.Tensor:
        """A region of them on a device, as the model sees it."""
        return self.prepare(self.read(region).to(device))

    def to(self, device: torch.device) -> torch.Tensor:
        """All of these samples on a device, as the model sees them."""
        return self.part(tuple((0, n) for n in self.shape), device)


def image_of(given: Any) -> StreamedImage:
    """A tensor or source as a streamed image."""
    if isinstance(given, torch.Tensor):
        return _Tensor(given)
    if isinstance(given, Source):
        return _Lazy(given)
    raise StreamError(
        f"an input must be a tensor or a source with shape, dtype and read(region), not {type(given).__name__}; "
        "outcore.data has sources for slides and arrays, outcore.stream.FunctionSource one for functions"
    )
