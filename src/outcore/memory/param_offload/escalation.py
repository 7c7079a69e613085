"""More state may be offloaded while a model trains.

The first steps can show that a plan needs more memory than was predicted, and a larger batch can need more than the
first. If no policies for saved tensors are enough then, the plan takes the next rung for parameters, gradients and
optimizer state (`outcore.planner.memory.state_policy.ladder`), between two steps: what is offloaded already stays so,
what has to leave the device leaves now, with gradients that are there to be added to. State is never moved back to the
device: the next plan starts from where it is.

Parameters must not leave the device while a backward is outstanding, because autograd would find them elsewhere than it
saved them. An offloader knows whether one is from its first optimizer step on; so where there is no offloader yet, the
optimizer's state goes first and the parameters follow before a later forward.
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


@dataclass
class StatePlacement:
    """What is needed to offload a model's state, and the policy to reach."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    calls: tuple[tuple[str, str, Sequence[str]], ...]
    """Name, block and parameters of the model's calls."""
    where: StatePolicy
    """The policy to apply as soon as state can be moved."""

    def start(self, managed_forward: ManagedForward) -> None:
        """Offload by the policy from the start, when no pass is under way."""
        if not self.where.idle:
            managed_forward.keeper = self._new(managed_forward.model, managed_forward.device)

    def _new(self, model: nn.Module, device: torch.device) -> StateOffloader:
        optimizer = self.optimizer()
        assert optimizer is not None
        return StateOffloader(optimizer, uses_of(model, self.calls), self.where, device)


def follow(managed_forward: ManagedForward, where: StatePolicy) -> bool:
    """Let state live where a plan says; returns whether any was moved."""
    placement, states = managed_forward.placement, managed_forward.settings.states
    if placement is None or placement.optimizer() is None:
        return False
    if where != placement.where:
        placement.where = where
        left = states[states.index(where) :] if where in states else (where,)
        managed_forward.settings = replace(managed_forward.settings, states=left)
    return move(managed_forward, placement)


def move(managed_forward: ManagedForward, placement: StatePlacement) -> bool:
    """Apply the policy if it is not applied yet and no backward is outstanding; returns whether state was moved."""
    before, where = managed_forward.keeper, placement.where
    if before is not None and before.policy is where:
        return False
    if where.idle or (before is not None and (before.policy == where or before.backward_pending)):
        return False
    if before is None:
        first = replace(where, parameters="keep", gradients="keep", stage_bytes=None)
        managed_forward.keeper = replace(placement, where=first)._new(managed_forward.model, managed_forward.device)
        managed_forward.keeper.backward_pending = True  # a backward may be outstanding
        return True
    managed_forward.keeper = _replacement(before, where)
    return True


def _replacement(before: StateOffloader, policy: StatePolicy) -> StateOffloader:
    """A new offloader that takes over the same state with another policy."""
    uses, state_copies = before.uses, None
    if before.policy.flat_buffer_bytes == policy.flat_buffer_bytes and policy.optimizer == "offload":
        state_copies, before.state_copies = before.state_copies, None  # its buckets are the same
    before.close()
    waiting = {id(p): p.grad for _, _, parameters in uses for p in parameters if p.grad is not None}
    for _, _, parameters in uses:
        for p in parameters:
            p.grad = None
    after = StateOffloader(before.optimizer, uses, policy, before.device, state_copies)
    for bucket in after.buckets:
        if after.gradients is not None and bucket.weights is not None:
            after.gradients.store(bucket, waiting)
            continue
        for p in bucket.trained:
            if (grad := waiting.get(id(p))) is not None:
                p.grad = grad.to(p.device)
    return after
