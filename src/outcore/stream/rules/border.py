"""Reading beyond the border: true padding at true borders, and nowhere else.

A tile in the middle of an image reads its neighbours' pixels where an untiled operation would; only what lies outside
of the whole image is made up, as the padding mode says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from outcore.ops.region import Border, Interval, Region, inside
from outcore.stream.execute.map_store import memory_format


@dataclass(frozen=True, slots=True)
class BorderedRegion:
    """Intervals of the last dimensions of a tensor that may reach beyond it."""

    shape: tuple[int, ...]
    """Of the whole tensor along these dimensions."""
    border: Border = "zeros"
    value: float = 0.0

    def needs(self, reach: Sequence[Interval]) -> Region:
        """The region of the tensor that must be there."""
        return tuple(inside(r, n, self.border) for r, n in zip(reach, self.shape, strict=True))

    def beyond(self, reach: Sequence[Interval]) -> tuple[Interval, ...]:
        """How far each interval reaches beyond the tensor, before and after."""
        return tuple((max(0, -a), max(0, b - n)) for (a, b), n in zip(reach, self.shape, strict=True))

    def read(self, crop: torch.Tensor, reach: Sequence[Interval]) -> torch.Tensor:
        """The wanted intervals, from a crop that holds what they need."""
        beyond, needed = self.beyond(reach), self.needs(reach)
        if any(low or high for low, high in beyond):
            amounts = [n for low, high in reversed(beyond) for n in (low, high)]
            if self.border in ("zeros", "constant"):
                crop = F.pad(crop, amounts, value=self.value)
            else:
                crop = F.pad(crop, amounts, mode=self.border)
        whole = tuple((0, n) for n in crop.shape[: crop.dim() - len(self.shape)])
        starts = (start - low for (start, _), (low, _) in zip(needed, beyond, strict=True))
        held = zip(starts, crop.shape[len(whole) :], strict=True)
        return sliced(crop, (*whole, *((a, a + n) for a, n in held)), (*whole, *reach))


def sliced(crop: torch.Tensor, held: Region, wanted: Region) -> torch.Tensor:
    """A region of a tensor of which another region is held; its gradient is stored in the tensor's own order."""
    if held != wanted and crop.requires_grad and torch.is_grad_enabled():
        made: torch.Tensor = _Sliced.apply(crop, held, wanted)  # type: ignore[no-untyped-call]
        return made
    return _narrowed(crop, held, wanted)


class _Sliced(torch.autograd.Function):
    """A slice whose backward fills one tensor of zeros, in the tensor's own format; autograd's own fills one per
    dimension, all stored channels first."""

    @staticmethod
    def forward(ctx: Any, crop: torch.Tensor, held: Region, wanted: Region) -> torch.Tensor:
        ctx.held, ctx.wanted, ctx.shape, ctx.format = held, wanted, crop.shape, memory_format(crop)
        return _narrowed(crop, held, wanted)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (part,) = gradients
        whole = torch.empty(ctx.shape, dtype=part.dtype, device=part.device, memory_format=ctx.format).zero_()
        _narrowed(whole, ctx.held, ctx.wanted).copy_(part)
        return whole, None, None


def _narrowed(crop: torch.Tensor, held: Region, wanted: Region) -> torch.Tensor:
    for dim, ((a, b), (lo, hi)) in enumerate(zip(held, wanted, strict=True)):
        if (a, b) != (lo, hi):
            crop = crop.narrow(dim, lo - a, hi - lo)
    return crop
