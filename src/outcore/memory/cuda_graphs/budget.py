"""Graphs are checked against the budget when they are captured, before the first step is taken.

What the allocator will reserve for a plan's tensors depends on the order in which they come and go, fragmentation
included, so it is not known from the plan; but it is known exactly once the graphs are captured, because nothing is
allocated when they run. If they take more than the budget leaves, the plan is made again with as much less and captured
again. If no plan is left, the step runs call by call, which reuses memory more freely, and the smallest budget for
graphs is named.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from outcore.machine.units import format_bytes, rounded_up
from outcore.memory.saved_tensors.replan import replanned
from outcore.memory.saved_tensors.settings import PlannedCall

if TYPE_CHECKING:
    from outcore.memory.saved_tensors.managed_forward import ManagedForward

_TRIES = 5
_GROWTH, _MOST_GROWTH = 2 * 20 * 2**20, 0.03
"""Segments grow by 20 MiB, on the stream of the loop and on that of the captures; of the budget, at most this share."""


def planned_again(
    managed_forward: ManagedForward,
    key: Hashable,
    entry: PlannedCall,
    tensors: list[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    """Capture the graphs of a step; returns whether they took more than the budget, so that there is another plan
    now."""
    assert entry.graphed is not None
    if any(t.requires_grad for t in tensors):
        return False
    settings = managed_forward.settings
    try:
        entry.graphed.capture(tensors, warm=managed_forward.only_graphs)  # live steps have run then
    except RuntimeError as error:
        warnings.warn(f"outcore: this step cannot be a CUDA graph ({error}); it runs call by call", stacklevel=4)
        entry.graphed = None
        return False
    if settings.budget_bytes is None or settings.policy is not None:
        return False
    active = entry.graphed.bytes + _beside(managed_forward, entry, tensors)
    missed = active - settings.budget_bytes
    if not settings.quiet:
        print(f"outcore: as CUDA graphs the step takes {format_bytes(active)}", file=sys.stderr)
    if missed <= 0:
        return False
    before = managed_forward.tried.get(key, [])
    managed_forward.tried[key] = [*before, active]
    entry.graphed.free()
    stuck = active in before  # the smallest plan again
    if not stuck and len(before) + 1 < _TRIES and _with_less(managed_forward, key, missed, args, kwargs):
        return True
    least = min(managed_forward.tried[key])
    warnings.warn(
        f"outcore: as CUDA graphs this step takes {format_bytes(least)}, more than the "
        f'{format_bytes(settings.budget_bytes)} it may; it runs call by call; give memory="{rounded_up(least)}" '
        "or more for graphs",
        stacklevel=4,
    )
    entry.graphed = None
    return False


def _with_less(
    managed_forward: ManagedForward, key: Hashable, missed: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Plan with so much less, or with as much less as can be; returns whether there is another plan."""
    before = managed_forward.settings
    assert before.budget_bytes is not None
    less = replace(before, reserved_bytes=before.reserved_bytes + missed)
    refused = replanned(managed_forward, key, less, args, kwargs)
    if refused is None:
        return True
    if refused.least_bytes is None:
        return False
    # Fragmentation differs from plan to plan, so the smallest may fit although it was not planned for.
    over = int((1 - before.margin) * (refused.least_bytes - before.budget_bytes)) + 2**20
    if over >= missed:
        return False
    least = replace(before, reserved_bytes=less.reserved_bytes - over)
    return replanned(managed_forward, key, least, args, kwargs) is None


def _beside(managed_forward: ManagedForward, entry: PlannedCall, tensors: list[torch.Tensor]) -> int:
    """Bytes that the step holds beside its graphs: weights, optimizer state and room for its step, the inputs, the
    loss, and what segments grow by beyond that."""
    settings, sizes = managed_forward.settings, entry.plan.keeping.costs.parameters
    optimizer = settings.optimizer.state_bytes(sizes) + settings.optimizer.workspace_bytes(sizes)
    model = sum(t.nbytes for t in (*managed_forward.model.parameters(), *managed_forward.model.buffers()))
    growth = min(_GROWTH, int(_MOST_GROWTH * (settings.budget_bytes or 0)))
    return model + optimizer + settings.beside_bytes + sum(t.nbytes for t in tensors) + _unused() + growth


def _unused() -> int:
    """Bytes that the allocator has reserved outside the graphs and nothing uses."""
    rest = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == (0, 0)]
    return sum(s["total_size"] - s["allocated_size"] for s in rest)
