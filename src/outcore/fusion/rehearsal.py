"""A fused step on tensors without memory: what it would need, counted.

Some layers are not the same when fused: cuDNN's LSTM keeps little, the one that steps through time for all members
keeps every gate. So the memory of a lane is not that of its members' own graphs; but a replay on fake tensors, with
backward, makes and drops exactly the tensors that the real one will, and counting them takes no device memory.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from outcore.cost.live import LiveBytes
from outcore.fusion.call import Randomness
from outcore.fusion.values import Stacked
from outcore.graph.structure import leaves

if TYPE_CHECKING:
    from outcore.fusion.lane import Lane
    from outcore.fusion.program import Program

__all__ = ["rehearse"]


def rehearse(lane: Lane, objective: str, program: Program, args: tuple[Any, ...]) -> int:
    """The peak in bytes of forward and backward of a lane, without its weights, with their gradients."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(value: Any) -> Any:
            if isinstance(value, Stacked):
                return Stacked(fake(value.tensor))
            made = mode.from_tensor(value.detach(), static_shapes=True)
            return made.requires_grad_(value.requires_grad)

        stack = copy.copy(lane.stack)
        stack.parameters = {name: fake(t) for name, t in lane.stack.parameters.items()}
        stack.buffers = {name: fake(t) for name, t in lane.stack.buffers.items()}
        tensors = [fake(t) for _, t in leaves(args, (Tensor, Stacked))]
        trained = [p for n in lane.steppers[objective].names if (p := stack.parameters[n]).requires_grad]
        apart = replace(program, ways={}, kept={})  # what is tried on fake tensors must not be remembered
        there = [*stack.parameters.values(), *stack.buffers.values(), *(_tensor(t) for t in tensors)]
        with LiveBytes(there) as live, lane.autocast():
            losses = apart.replay(lane.trainings[objective], stack, tensors, Randomness(None), lane.first)[0]
            found = torch.autograd.grad(losses.tensor.sum(), trained, allow_unused=True)
            del losses, found
        peak: int = live.peak
    return peak


def _tensor(value: Tensor | Stacked) -> Tensor:
    return value.tensor if isinstance(value, Stacked) else value
