"""One step before the first: what a plan really reserves is seen before the user's training begins.

A budget bounds what a card of that size would have to have: reserved memory, with the holes that the allocator leaves
between tensors and what libraries take for themselves. Neither follows from the plan alone, and the first step counts.
So when a model comes under its plan, a step is taken with the user's own batch, and the model is put back as it was:
weights, statistics, attributes, gradients and random state. If the allocator had to reserve more than the budget, the
plan is made again with as much less, until it fits or there is no smaller one.

A loss of the user's is taken if there is one; else the sum of the outputs. The optimizer does not step: what its state
will take is added.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from outcore.errors import PlanError
from outcore.graph.preserve import ModelState, state_tensors
from outcore.graph.structure import leaves
from outcore.machine.units import format_bytes
from outcore.memory.admission import Admitted
from outcore.memory.governor import Governor

__all__ = ["rehearse"]

_TRIES = 6
_STEP = 0.05
"""Share of the budget to leave free in addition where the device had no room for a step, or only after a search."""


def rehearse(
    governor: Governor,
    key: Hashable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
) -> None:
    """Take steps on the device until what they reserve is within the budget.

    Args:
        governor: of the model, with its first plan.
        key: of the call that is rehearsed.
        args: of the call.
        kwargs: of the call.
        loss: of the output; without it the sum of all outputs.
    """
    budget, tensors = governor.settings.budget_bytes, [t for _, t in leaves((args, kwargs), torch.Tensor)]
    unreal = any(t.is_meta or isinstance(t, FakeTensor) for t in tensors)
    if budget is None or unreal or governor.device.type != "cuda" or governor.settings.policy is not None:
        return
    for _ in range(_TRIES):
        entry = governor.admitted.get(key)
        if entry is None or entry.graphed is not None or not entry.plan.state.idle:
            return
        taken = _reserved(governor, entry, args, kwargs, loss)
        if taken <= budget:
            return
        before, missed = governor.settings, taken - budget
        less = replace(before, reserved_bytes=before.reserved_bytes + missed)
        refused = governor.replanned(key, less, args, kwargs)
        if refused is not None:
            enough = refused.least_bytes + less.reserved_bytes if refused.least_bytes is not None else taken
            error = PlanError(
                f"a training step reserves {format_bytes(taken)} within {format_bytes(budget)}, and no plan with as "
                f'much less was found; give memory="{-(-max(taken, enough) // 2**20)}MiB" or more'
            )
            error.least_bytes = max(taken, enough)
            raise error
        if not before.quiet:
            print(f"outcore: a step reserved {format_bytes(missed)} too much; planned again", file=sys.stderr)


def _reserved(
    governor: Governor,
    entry: Admitted,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
) -> int:
    """Bytes that the allocator reserves for a step, with the optimizer's state, without what others hold."""
    model, device = governor.model, governor.device
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
    budget = governor.settings.budget_bytes or 0
    try:
        output = governor(*args, **kwargs)
        value = loss(output) if loss is not None else _total(output)
        del output
        value.backward()
        del value
        torch.cuda.synchronize(device)
        state = governor.settings.optimizer.state_bytes(entry.plan.keeping.costs.parameters)
        taken: int = torch.cuda.max_memory_reserved(device) - others + state
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
