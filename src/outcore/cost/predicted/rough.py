"""Rough times, where none were measured: enough to compare choices, not to predict a step.

Policies are chosen by what they cost relative to each other, and most of what is chosen between (norms, activations,
sums) takes as long as its memory does. So a time in proportion to bytes is a usable substitute: for all calls where
nothing was measured, for single calls that were not, and for the calls of a network at another size.
"""

from __future__ import annotations

from dataclasses import replace

from outcore.cost.costs import CallCost, Costs
from outcore.machine.clock import TimedRuns


def scaled(costs: Costs, like: Costs) -> Costs:
    """Times and workspaces of the same calls on other sizes, in proportion to the bytes they make."""

    def at_this_size(cost: CallCost) -> CallCost:
        model = like.calls.get(cost.call)
        if model is None or model.forward is None:
            return cost
        ratio = max(cost.output_bytes, 1) / max(model.output_bytes, 1)
        backward = TimedRuns.of([model.backward.median_s * ratio]) if model.backward is not None else None
        return replace(
            cost,
            forward=TimedRuns.of([model.forward.median_s * ratio]),
            backward=backward,
            workspace_forward_bytes=max(cost.workspace_forward_bytes, int(ratio * model.workspace_forward_bytes)),
            workspace_backward_bytes=max(cost.workspace_backward_bytes, int(ratio * model.workspace_backward_bytes)),
            time_source="scaled",
        )

    calls = {name: at_this_size(cost) for name, cost in costs.calls.items()}
    return replace(costs, calls=calls, library_bytes=like.library_bytes)


def by_bytes(costs: Costs, rate: float) -> Costs:
    """Times from bytes and FLOPs alone: enough to compare choices where nothing was measured."""
    flops_rate = 10 * rate

    def timed(cost: CallCost) -> CallCost:
        moved = cost.output_bytes + sum(s.bytes for s in cost.saved if s.kind == "value")
        forward = max(moved / rate, cost.flops_forward / flops_rate)
        backward = max(2 * moved / rate, cost.flops_backward / flops_rate) if cost.has_backward else None
        return replace(
            cost,
            forward=TimedRuns.of([forward]),
            backward=TimedRuns.of([backward]) if backward is not None else None,
            time_source="analytic",
        )

    return replace(costs, calls={name: timed(cost) for name, cost in costs.calls.items()})


def without_gaps(costs: Costs) -> Costs:
    """Costs in which every call has a time: those that were not measured take as long as their bytes suggest."""
    timed = [c for c in costs.calls.values() if c.forward is not None]
    total_s = sum(c.time_s for c in timed)
    rate = total_s / max(1, sum(c.output_bytes + 1 for c in timed))
    if len(timed) == len(costs.calls):
        return costs
    calls = {
        name: c
        if c.forward is not None
        else replace(
            c, forward=TimedRuns.of([rate * c.output_bytes / 3]), backward=TimedRuns.of([rate * c.output_bytes / 1.5])
        )
        for name, c in costs.calls.items()
    }
    return replace(costs, calls=calls)
