"""A step of a group on fake tensors: its memory, counted.

Some layers are not the same when fused: cuDNN's LSTM saves little, the one that steps through time for all members
saves every gate. So the memory of a group is not that of its members' own graphs; but a replay on fake tensors, with
backward, makes and drops exactly the tensors that the real one will, and counting them takes no device memory. Fed to
the simulated allocator, they also give what a graph with a pool of its own will reserve.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from outcore.allocator.caching_allocator import ReservedBytes
from outcore.fusion.program.call import MemberRandomness
from outcore.fusion.program.values import Stacked, member_of
from outcore.graph.structure import leaves, substitute

if TYPE_CHECKING:
    from outcore.fusion.group import Group
    from outcore.fusion.program.program import StackedProgram

__all__ = ["DryRunBytes", "dry_run"]


@dataclass(frozen=True, slots=True)
class DryRunBytes:
    """Bytes of forward and backward of a group, without its weights, with their gradients."""

    peak: int
    """Of living tensors."""
    reserved: int
    """Of the allocator's segments, if it starts with none."""


def dry_run(
    group: Group, objective: str, program: StackedProgram, args: tuple[Any, ...], *, own_model: bool
) -> DryRunBytes:
    """Count a step of a group; with `own_model`, of one member's own model."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(value: Any) -> Any:
            if isinstance(value, Stacked):
                return Stacked(fake(value.tensor))
            made = mode.from_tensor(value.detach(), static_shapes=True)
            return made.requires_grad_(value.requires_grad)

        stack = copy.copy(group.stack)
        stack.parameters = {name: fake(t) for name, t in group.stack.parameters.items()}
        stack.buffers = {name: fake(t) for name, t in group.stack.buffers.items()}
        given = substitute(args, (Tensor, Stacked), fake)
        tensors = [t for _, t in leaves(given, (Tensor, Stacked))]
        there = [*stack.parameters.values(), *stack.buffers.values(), *(_tensor(t) for t in tensors)]
        views = {first: stack[first][0] for first in stack.names.values()}
        own = {f"model.{name}": views[first] for name, first in stack.names.items()} if own_model else {}
        trained = [n for n in group.steppers[objective].names if stack.parameters[n].requires_grad]
        wanted = [own[f"model.{n}"] if own_model else stack.parameters[n] for n in trained]
        apart = replace(program, ways={}, kept={})  # what is tried on fake tensors must not be remembered
        with ReservedBytes([*there, *own.values()]) as live, group.autocast():
            if own_model:
                loss = functional_call(group.trainings[objective][0], own, member_of(given, 0))[0]
            else:
                made = apart.replay(group.trainings[objective], stack, tensors, MemberRandomness(None), group.first)
                loss = made[0].tensor.sum()
                del made
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
            del loss, found
        return DryRunBytes(live.peak, live.allocator.reserved)


def _tensor(value: Tensor | Stacked) -> Tensor:
    return value.tensor if isinstance(value, Stacked) else value
