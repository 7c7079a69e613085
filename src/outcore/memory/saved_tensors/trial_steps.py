"""One step before the first: what a plan really reserves is seen before the user's training begins.

A budget bounds what a card of that size would have to have: reserved memory, with the holes that the allocator leaves
between tensors and what libraries take for themselves. Neither follows from the plan alone, and the first step counts.
So when a model comes under its plan, two steps are taken with the user's own batch, and the model is put back as it
was: weights, statistics, attributes, gradients and random state. If the allocator had to reserve more than the budget,
the plan is made again with as much less, until it fits; if there is no smaller one, that is said.

A loss of the user's is taken if there is one; else the sum of the outputs. The optimizer does not step: memory of the
size of its state is taken where it would take it, and a second step shows what lies between.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from outcore.graph import Graph
from outcore.graph.record.preserve import ModelState, state_tensors
from outcore.graph.structure import leaves
from outcore.machine.units import format_bytes
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.memory.saved_tensors.settings import PlannedCall

__all__ = ["run_trial_steps"]

_TRIES = 6
_STEP = 0.05
"""Share of the budget to leave free in addition where the device had no room for a step, or only after a search."""


def run_trial_steps(
    managed_forward: ManagedForward,
    key: Hashable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    graph: Graph,
) -> None:
    """Take steps on the device until what they reserve is within the budget.

    Args:
        managed forward: of the model, with its first plan.
        key: of the call that is tried.
        args: of the call.
        kwargs: of the call.
        loss: of the output; without it the sum of all outputs.
        graph: what was recorded of the call.
    """
    budget, tensors = managed_forward.settings.budget_bytes, [t for _, t in leaves((args, kwargs), torch.Tensor)]
    unreal = any(t.is_meta or isinstance(t, FakeTensor) for t in tensors)
    if budget is None or unreal or managed_forward.device.type != "cuda" or managed_forward.settings.policy is not None:
        return
    for attempt in range(_TRIES):
        entry = managed_forward.admitted.get(key)
        if entry is None or entry.graphed is not None or not entry.plan.state.idle:
            return
        taken = _reserved(managed_forward, entry, args, kwargs, loss)
        if taken <= budget:
            return
        before, missed = managed_forward.settings, taken - budget
        less = replace(before, reserved_bytes=before.reserved_bytes + missed)
        refused = managed_forward.replanned(key, less, args, kwargs, graph)
        if refused is not None or attempt == _TRIES - 1:
            warnings.warn(
                f"outcore: a step reserves {format_bytes(taken)}, more than {format_bytes(budget)}, with what the "
                f'allocator leaves unused between tensors; memory="{-(-taken // 2**20)}MiB" would hold',
                stacklevel=3,
            )
            return
        if not before.quiet:
            print(f"outcore: a step reserved {format_bytes(missed)} too much; planned again", file=sys.stderr)


def _reserved(
    managed_forward: ManagedForward,
    entry: PlannedCall,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
) -> int:
    """Bytes that the allocator reserves for a step, with the optimizer's state, without what others hold."""
    model, device = managed_forward.model, managed_forward.device
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [(p, p.grad) for p in parameters]
    for p in parameters:
        p.grad = None
    before = ModelState(model, state_tensors(model))
    watching, entry.observer = entry.observer, None
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    own += sum(t.nbytes for _, t in leaves((args, kwargs), torch.Tensor) if t.device.type == "cuda")
    others = max(0, torch.cuda.memory_allocated(device) - own)
    torch.cuda.reset_peak_memory_stats(device)
    retries = torch.cuda.memory_stats(device)["num_alloc_retries"]
    budget = managed_forward.settings.budget_bytes or 0
    held: list[torch.Tensor] = []
    try:
        for _ in range(2):  # between the two, what the optimizer allocates in its first step
            output = managed_forward(*args, **kwargs)
            value = loss(output) if loss is not None else _total(output)
            del output
            value.backward()
            del value
            copies = 0 if held else round(managed_forward.settings.optimizer.state_per_parameter)
            held += [torch.empty_like(p) for p in parameters for _ in range(copies)]
            for p in parameters:
                p.grad = None
        torch.cuda.synchronize(device)
        taken: int = torch.cuda.max_memory_reserved(device) - others
        retried = torch.cuda.memory_stats(device)["num_alloc_retries"] > retries
        return max(taken, int((1 + _STEP) * budget)) if retried else taken
    except torch.OutOfMemoryError:
        return int((1 + _STEP) * budget)
    finally:
        before.restore()
        for p, gradient in gradients:
            p.grad = gradient
        entry.observer = watching
        torch.cuda.empty_cache()


def _total(output: Any) -> torch.Tensor:
    """The sum of all outputs that lead back to parameters."""
    found = [t for _, t in leaves(output, torch.Tensor) if t.requires_grad and t.is_floating_point()]
    return torch.stack([t.float().sum() for t in found]).sum()
