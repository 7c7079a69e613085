"""One value, read by several nodes at different regions.

autograd would make, for every region, a gradient of the whole value filled with zeros, and add them up: three passes
over memory for a skip connection that is one pixel narrower than the value. Here the regions are made together, and in
backward the smaller gradients are added into the one that covers the whole.

Regions keep the value's memory format, which needs care: of a batch of one that is stored channels last, `view_as`
makes a view whose strides are no longer taken for channels last, and pools and concatenations would convert it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outcore.ops.region import Region
from outcore.stream.execute.map_store import memory_format
from outcore.stream.rules.border import sliced

__all__ = ["fork"]


def fork(
    value: torch.Tensor, held: Region, regions: Sequence[Region], fresh: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """The regions of a value of which another region is held.

    Args:
        value: what is held.
        held: its region.
        regions: what is wanted, one per reader.
        fresh: whether the reader's gradient is a tensor that nobody else has, and may be added to.
    """
    made: tuple[torch.Tensor, ...] = _Fork.apply(value, held, tuple(regions), tuple(fresh))  # type: ignore[no-untyped-call]
    return made


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, held: Region, regions: tuple[Region, ...], fresh: tuple[bool, ...]
    ) -> tuple[torch.Tensor, ...]:
        ctx.held, ctx.regions, ctx.fresh = held, regions, fresh
        ctx.shape, ctx.format = value.shape, memory_format(value)
        ctx.set_materialize_grads(False)
        parts = (sliced(value, held, region) for region in regions)
        return tuple(part.narrow(0, 0, part.shape[0]) for part in parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        there = [i for i, g in enumerate(gradients) if g is not None]
        if not there:
            return None, None, None, None
        wholes = [i for i in there if ctx.regions[i] == ctx.held]
        first = next((i for i in wholes if ctx.fresh[i]), wholes[0] if wholes else None)
        if first is None:
            first = there[0]
            some = gradients[first]
            assert some is not None
            total = torch.empty(ctx.shape, dtype=some.dtype, device=some.device, memory_format=ctx.format).zero_()
            sliced(total, ctx.held, ctx.regions[first]).copy_(some)
        else:
            chosen = gradients[first]
            assert chosen is not None
            total = chosen if ctx.fresh[first] or len(there) == 1 else chosen.clone()
        for i in there:
            part = gradients[i]
            if i != first and part is not None:
                sliced(total, ctx.held, ctx.regions[i]).add_(part)
        return total, None, None, None
