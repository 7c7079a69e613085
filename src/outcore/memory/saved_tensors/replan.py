"""Planning a way of calling a model again: when a step took more than its budget, when the allocator did not find room
for it at once, or when a fused norm disappoints.

The plan before is where the new search starts, and it stays if there is no new one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.machine.units import format_bytes
from outcore.memory.saved_tensors.peak_monitor import MeasuredStep
from outcore.memory.saved_tensors.settings import PlannedCall, Settings

if TYPE_CHECKING:
    from outcore.memory.saved_tensors.managed_forward import ManagedForward

_FOR_ALLOCATOR = 0.03
"""Share of the budget that is left to an allocator which had to look twice for room."""


def admit_larger(managed: ManagedForward, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Plan a call that is larger than those before it; if it cannot be done within the budget, as small as it can be.

    A training is not ended because one graph, sentence or image is larger than the first: that is said, and the step
    takes what it needs.
    """
    try:
        managed.admit(key, args, kwargs)
    except PlanError as refused:
        least, before = refused.least_bytes, managed.settings
        if least is None or before.budget_bytes is None or before.policy is not None or managed.only_graphs:
            raise
        warnings.warn(
            f"outcore: this call is larger than the one that was planned for, and needs {format_bytes(least)} where "
            f"the budget is {format_bytes(before.budget_bytes)}; it takes as little as was found",
            stacklevel=5,
        )
        managed.settings = replace(before, budget_bytes=least)
        try:
            managed.admit(key, args, kwargs)
        finally:
            managed.settings = before


def corrected(
    managed: ManagedForward,
    key: Hashable,
    entry: PlannedCall,
    seen: MeasuredStep,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    """Put what was measured beside the plan; whether that was above the budget and there is a new plan."""
    entry.observer, entry.measured = None, seen
    if not managed.settings.quiet:
        print(f"outcore: {seen.beside(entry.plan)}", file=sys.stderr)
    budget, before = managed.settings.budget_bytes, managed.settings
    if budget is None or seen.peak_bytes is None or before.policy is not None:
        return compared(managed, key, entry, seen, args, kwargs)
    if seen.peak_bytes <= budget:
        if seen.retries and not managed.settings.graphs:
            more = replace(before, reserved_bytes=before.reserved_bytes + int(_FOR_ALLOCATOR * budget))
            return replanned(managed, key, more, args, kwargs) is None
        return compared(managed, key, entry, seen, args, kwargs)
    missed = seen.peak_bytes - entry.plan.peak_bytes
    less = replace(before, reserved_bytes=before.reserved_bytes + missed)
    if (refused := replanned(managed, key, less, args, kwargs)) is not None:
        warnings.warn(f"outcore: the step is {format_bytes(missed)} above its prediction; {refused}", stacklevel=4)
        least = refused.least_bytes  # the nearest there is to the budget
        if least is None or least >= seen.peak_bytes:
            return False
        if replanned(managed, key, replace(less, budget_bytes=least), args, kwargs) is not None:
            return False
    if not before.quiet:
        print(f"outcore: planned again with {format_bytes(missed)} less", file=sys.stderr)
    return True


def replanned(
    managed: ManagedForward,
    key: Hashable,
    settings: Settings,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    graph: Graph | None = None,
) -> PlanError | None:
    """Plan a way of calling the model anew under other settings; the refusal, if that cannot be.

    `graph` is what was recorded of it, if that still holds.
    """
    before, entry = managed.settings, managed.admitted.pop(key)
    managed.settings = settings
    try:
        managed.admit(key, args, kwargs, graph=graph, near=entry.plan if entry is not None else None)
    except PlanError as refused:
        managed.settings, managed.admitted[key] = before, entry
        return refused.with_traceback(None)  # whose frames would keep the model alive
    return None


def compared(
    managed: ManagedForward,
    key: Hashable,
    entry: PlannedCall,
    seen: MeasuredStep,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    """Where fused norms disappoint, watch the library's for as long and keep what is faster; whether it changes."""
    if key in managed.ab_test.waiting:
        stays = managed.admitted[key] = managed.ab_test.end(key, entry, seen)
        if not managed.settings.quiet:
            print(f"outcore: {managed.ab_test.outcome(key)}", file=sys.stderr)
        managed.settings = replace(managed.settings, fuse=stays is not entry)
        return stays is not entry
    if not managed.ab_test.wanted(entry, seen):
        return False
    before, managed.settings = managed.settings, replace(managed.settings, fuse=False)
    try:
        managed.admit(key, args, kwargs)
    except PlanError:
        managed.settings, managed.admitted[key] = before, entry
        return False
    managed.ab_test.begin(key, entry, seen)
    return True
