"""Whether a network runs with channels last: both memory formats are recorded, measured and planned, and the faster is
taken.

                  ┌─ as given ─────── costs ── plan ─┐
    a network ────┤                                  ├──▶ the faster of those within the budget
                  └─ channels last ── costs ── plan ─┘

Which is faster depends on the kernels that a library has for these shapes on this device, so calls are measured one by
one in both formats (each for half of the time). A difference of less than `_CLEARLY` is noise, and the format stays. On
a CPU it is never tried: there, the gain is small and measuring costs the time of several steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from outcore.cost.costs import Costs
from outcore.errors import CaptureError, PlanError
from outcore.graph import Graph
from outcore.graph.memory_format import ChannelsLast, channels_last, drawn, recorded
from outcore.machine.units import format_bytes
from outcore.memory.saved_tensors.plan_call import CallProposal, propose
from outcore.memory.saved_tensors.settings import Settings
from outcore.planner.memory.memory_format import MemoryFormat
from outcore.planner.memory.plan import plan_memory

_DEVICES = {"cuda"}
"""Devices on which the format makes a difference."""
_CLEARLY = 0.98
"""The other format must take less than this share of the time as given."""


@dataclass(frozen=True)
class FormatTrial:
    """A network in one memory format."""

    graph: Graph
    costs: Costs
    settings: Settings
    found: CallProposal | None = None
    """Its plan, if there is one already."""


def other_order(
    model: nn.Module, graph: Graph, args: Any, kwargs: Mapping[str, Any] | None, device: torch.device | None
) -> tuple[Graph | None, MemoryFormat]:
    """A network with its channels last; or None, and why.

    Args:
        model: the user's.
        graph: of it, in the format of its inputs.
        args: of the call.
        kwargs: of the call.
        device: where it computes, if that may rule the trial out; None where the user has decided.
    """
    if device is not None and device.type not in _DEVICES:
        return None, MemoryFormat()
    order = channels_last(graph)
    if not isinstance(order, ChannelsLast):
        return None, MemoryFormat(why=order)
    try:
        turned = recorded(model, args, kwargs, order)
    except CaptureError as error:
        reason = str(error).partition("; and ")[0]  # why there was no second try does not matter here
        return None, MemoryFormat(why=f"the network cannot run with its channels last: {reason}")
    if (call := drawn(graph, turned)) is not None:
        return None, MemoryFormat(why=f"{call} could draw other random numbers with channels last")
    return turned, MemoryFormat(order, "by the plan" if device is None else "")


def faster(given: FormatTrial, turned: Graph, costs: Costs, model: nn.Module, device: torch.device) -> FormatTrial:
    """The format whose plan is the faster one within the budget.

    Args:
        given: the network in the format of its inputs; its settings name the other format.
        turned: the network in the other format.
        costs: of the network in the other format.
        model: the user's.
        device: where it computes.

    Raises:
        PlanError: neither meets the budget; names the smaller of the two that would do.
    """
    settings = given.settings
    plain = plan_memory(
        given.graph,
        given.costs,
        budget_bytes=None,
        optimizer=settings.optimizer,
        loss_bytes=settings.beside_bytes,
        policy={},
    )
    order = replace(settings.order, plain_s=plain.keeping.plain_s, plain_bytes=plain.plain_bytes)
    other = FormatTrial(turned, costs, replace(settings, order=order))
    given = replace(given, settings=replace(settings, order=MemoryFormat()))
    first, second = _planned(given, model, device), _planned(other, model, device)
    if isinstance(first, PlanError) and isinstance(second, PlanError):
        raise min(first, second, key=lambda refused: refused.least_bytes or 2**62)
    if isinstance(second, PlanError):
        return _chosen(given, first, "with channels last no plan meets the budget")
    if isinstance(first, PlanError):
        return _chosen(other, second, "as given, no plan meets the budget")
    ratio = _seconds(second) / max(_seconds(first), 1e-12)
    if ratio > _CLEARLY:
        return _chosen(given, first, f"with channels last the step would take {ratio:.2f}x")
    saved = _workspace(given) - _workspace(other)
    less = f", with {format_bytes(saved)} less workspace" if saved > 0 else ""
    return _chosen(other, second, f"{ratio:.2f}x of the time as given{less}")


def _planned(way: FormatTrial, model: nn.Module, device: torch.device) -> CallProposal | PlanError:
    try:
        return propose(way.graph, model, way.costs, way.settings, device, None)
    except PlanError as refused:
        return refused.with_traceback(None)  # whose frames would keep the model alive


def _chosen(way: FormatTrial, found: CallProposal | PlanError, why: str) -> FormatTrial:
    """A trial that was chosen, with the reason in words."""
    assert isinstance(found, CallProposal)
    order = replace(found.plan.order, why=why)
    found = replace(found, plan=replace(found.plan, order=order))
    return replace(way, settings=replace(way.settings, order=order), found=found)


def _seconds(found: CallProposal) -> float:
    return found.plan.outcome.time_s + found.plan.state_s


def _workspace(way: FormatTrial) -> int:
    """The largest workspace of one operation, beside its inputs and outputs."""
    rows = way.costs.calls.values()
    return max((max(c.workspace_forward_bytes, c.workspace_backward_bytes) for c in rows), default=0)
