"""State may move further down while a model trains.

The first steps can show that a plan needs more than was predicted, and a larger batch can need more than the first. If
no policies for values are enough then, the plan takes the next place for parameters, gradients and optimizer state
(`outcore.planner.memory.state_policy.ladder`), between two steps: what is at home already stays there, what has to
leave leaves now, with gradients that are there to be added to. State never comes back up: whoever plans next starts
from where it is.

Parameters must not leave while a backward is outstanding, because autograd would find them elsewhere than it saved
them. Whether one is, a keeper knows from one optimizer's step on; so where there is none yet, the optimizer's state
goes first and the parameters follow before a later forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from outcore.memory.param_offload.buckets import uses_of
from outcore.memory.param_offload.offloader import StateOffloader
from outcore.planner.memory.state_policy import StatePolicy

if TYPE_CHECKING:
    from outcore.memory.saved_tensors.managed_forward import ManagedForward

__all__ = ["StateDuty", "follow", "move"]


@dataclass
class StateDuty:
    """What it takes to keep a model's state below the device, and where it is to be."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    calls: tuple[tuple[str, str, Sequence[str]], ...]
    """Name, block and parameters of the model's calls."""
    where: StatePolicy
    """Where state lives, as soon as it can be moved."""

    def keep(self, managed_forward: ManagedForward) -> None:
        """Begin: nothing of the model is under way."""
        if not self.where.idle:
            managed_forward.keeper = self._new(managed_forward.model, managed_forward.device)

    def _new(self, model: nn.Module, device: torch.device) -> StateOffloader:
        optimizer = self.optimizer()
        assert optimizer is not None
        return StateOffloader(optimizer, uses_of(model, self.calls), self.where, device)


def follow(managed_forward: ManagedForward, where: StatePolicy) -> bool:
    """State is to live where a plan says; returns whether it moved."""
    duty, states = managed_forward.duty, managed_forward.settings.states
    if duty is None or duty.optimizer() is None:
        return False
    if where != duty.where:
        duty.where = where
        left = states[states.index(where) :] if where in states else (where,)
        managed_forward.settings = replace(managed_forward.settings, states=left)
    return move(managed_forward, duty)


def move(managed_forward: ManagedForward, duty: StateDuty) -> bool:
    """Let state live where it is to, if it does not and nothing is outstanding; returns whether it moved."""
    before, where = managed_forward.keeper, duty.where
    if before is not None and before.policy is where:
        return False
    if where.idle or (before is not None and (before.policy == where or before.open)):
        return False
    if before is None:
        first = replace(where, parameters="keep", gradients="keep", stage_bytes=None)
        managed_forward.keeper = replace(duty, where=first)._new(managed_forward.model, managed_forward.device)
        managed_forward.keeper.open = True  # for all that is known
        return True
    managed_forward.keeper = _successor(before, where)
    return True


def _successor(before: StateOffloader, policy: StatePolicy) -> StateOffloader:
    """Who keeps the same state by another policy from now on."""
    uses, visits = before.uses, None
    if before.policy.flat_buffer_bytes == policy.flat_buffer_bytes and policy.optimizer == "offload":
        visits, before.visits = before.visits, None  # its buckets are the same
    before.close()
    waiting = {id(p): p.grad for _, _, parameters in uses for p in parameters if p.grad is not None}
    for _, _, parameters in uses:
        for p in parameters:
            p.grad = None
    after = StateOffloader(before.optimizer, uses, policy, before.device, visits)
    for bucket in after.buckets:
        if after.gradients is not None and bucket.weights is not None:
            after.gradients.hold(bucket, waiting)
            continue
        for p in bucket.trained:
            if (grad := waiting.get(id(p))) is not None:
                p.grad = grad.to(p.device)
    return after
