"""One level of a slide at another magnification, still lazy.

Every pixel is the mean of the area it covers in the finer image, fractions of pixels counted as fractions. The weights
of a pixel depend on its own position alone and are added in the same order whatever else is asked for, so two reads
that overlap agree bitwise: a slide resampled tile by tile has no seams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outcore.data.source import Region, Source, Span, spans

_BAND_BYTES = 8 << 20
"""Of pixels as numbers of 64 bits that are held at once."""


@dataclass(frozen=True)
class Resampled:
    """A source whose trailing dimensions are reduced by a factor of one or more.

    >>> from outcore.data.source import ArraySource
    >>> image = ArraySource(torch.tensor([[[0, 2, 4, 6]] * 2], dtype=torch.uint8))
    >>> Resampled(image, 2.0).read([(0, 1), (0, 1), (0, 2)])
    tensor([[[1, 5]]], dtype=torch.uint8)
    """

    source: Source
    factor: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The size after reducing; a rest that fills no pixel is dropped."""
        channels, *size = self.source.shape
        # A whole number of pixels must not be lost to the last bit of a quotient.
        return (channels, *(max(1, math.floor(n / self.factor + 1e-6)) for n in size))

    @property
    def dtype(self) -> torch.dtype:
        """That of the source; integers are rounded."""
        return self.source.dtype

    def read(self, region: Region) -> Tensor:
        """One box of the reduced image."""
        channels, *box = spans(region, self.shape)
        if any(start == stop for start, stop in box):
            return torch.empty([b - a for a, b in (channels, *box)], dtype=self.dtype, device="cpu")
        first, *others = box
        beside = math.prod(b - a for a, b in (channels, *others)) * self.factor ** len(box)
        rows = max(1, int(_BAND_BYTES / (8 * beside)))
        cuts = range(*first, rows)
        return torch.cat([self._band([channels, (a, min(a + rows, first[1])), *others]) for a in cuts], dim=1)

    def _band(self, region: Sequence[Span]) -> Tensor:
        """Some rows of a box: numbers of 64 bits are made of the pixels below, so few of them at a time."""
        channels, *box = region
        needed = [self._needed(span, size) for span, size in zip(box, self.source.shape[1:], strict=True)]
        values = self.source.read([channels, *needed]).to(torch.float64)
        for dim, (span, held) in enumerate(zip(box, needed, strict=True), start=1):
            values = self._mean(values, dim, span, held)
        if self.dtype.is_floating_point:
            return values.to(self.dtype)
        return values.round_().to(self.dtype)

    def _needed(self, span: Span, size: int) -> Span:
        return math.floor(span[0] * self.factor), min(size, max(math.ceil(span[1] * self.factor), 1))

    def _mean(self, values: Tensor, dim: int, span: Span, held: Span) -> Tensor:
        """The mean along one dimension; tap by tap, so that the order of adding is fixed."""
        position = torch.arange(*span, dtype=torch.float64, device="cpu")
        begin, end = position * self.factor, (position + 1) * self.factor
        first = begin.floor()
        column = [1] * values.ndim
        column[dim] = -1
        total = torch.zeros([], device="cpu")
        for tap in range(math.ceil(self.factor) + 1):
            pixel = first + tap
            weight = (torch.minimum(end, pixel + 1) - torch.maximum(begin, pixel)).clamp_(min=0.0) / self.factor
            index = (pixel.long() - held[0]).clamp_(0, held[1] - held[0] - 1)
            total = total + values.index_select(dim, index) * weight.reshape(column)
        return total
