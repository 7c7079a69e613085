"""Grouped, unfolded, one by one: measured for every convolution of a network.

How fast a grouped convolution is depends on shapes in ways that are hard to predict; for some it is slower than as many
plain ones. So the convolutions of one replay are collected, each shape is timed in all ways, forward and backward, on
made-up numbers, and `outcore.fusion.rules.convolution.way` answers by what was found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outcore.fusion.program.values import Stacked
from outcore.fusion.rules import convolution
from outcore.machine.clock import time_calls

if TYPE_CHECKING:
    from outcore.fusion.array import FusedArray

__all__ = ["measure_convolutions"]


def measure_convolutions(array: FusedArray, *batch: Any, seconds: float = 0.01) -> dict[str, int]:
    """Decide for each convolution of an array; returns how many shapes run which way."""
    group = array.groups[0]
    args = array.arguments(batch, None)
    seen: dict[Any, tuple[convolution.MemberConvolution, Tensor, Tensor]] = {}
    with torch.no_grad(), convolution.collecting(seen):
        for name in array.slots[0].trainings:
            _, program = array.program(name, args)
            if program.obstacle is None and len(group) > 1:
                kept = {n: t.clone() for n, t in group.stack.buffers.items()}
                group.forward(name, program, args, own_model=False)
                for buffer, content in kept.items():
                    group.stack.buffers[buffer].copy_(content)
    found: dict[str, int] = {}
    for signature, (conv, x, weight) in seen.items():
        best = min(conv.ways(x, weight), key=lambda way: _time(conv, x, weight, way, group.device, seconds))
        convolution.decide(signature, best)
        found[best] = found.get(best, 0) + 1
    return found


def _time(
    conv: convolution.MemberConvolution, x: Tensor, weight: Tensor, way: str, device: torch.device, seconds: float
) -> float:
    given = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).normal_().requires_grad_()
    own = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=device).normal_()
    own.requires_grad_()

    def both() -> None:
        conv.stacked(way, Stacked(given), own, None).tensor.sum().backward()
        given.grad = own.grad = None

    return time_calls(both, device, seconds=seconds, warmup=2, most=10).median_s
