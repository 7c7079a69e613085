"""What of a call's time is the same for a part of the batch.

A pipeline runs a batch in micro-batches, and not all time shrinks with them: weights are read for however few samples,
small convolutions leave vector units and caches half used, Python and the framework cost the same for any size. So the
calls are measured twice, with the whole batch and with a part of it, and a straight line is laid through the two:

    seconds of a fraction f  =  fixed + (whole - fixed) f

On four images a convolution of a few channels takes up to twice the eighth of what it takes on 32. A part that took
more than the whole is noise, and counts as the whole; one that took less than its share has nothing fixed.
"""

from __future__ import annotations

from dataclasses import replace

from outcore.cost.costs import Costs
from outcore.errors import OutcoreError
from outcore.machine.clock import TimedRuns

__all__ = ["with_fixed_times"]


def with_fixed_times(costs: Costs, part: Costs, fraction: float) -> Costs:
    """The costs of a batch with what of every call's time is fixed.

    Args:
        costs: of every call with the whole batch.
        part: of the same network, recorded and measured with a part of the batch.
        fraction: which part, between 0 and 1.
    """
    if not 0 < fraction < 1:
        raise OutcoreError(f"a part of the batch is a fraction between 0 and 1, not {fraction}")
    if missing := costs.calls.keys() - part.calls.keys():
        raise OutcoreError(
            f"with a part of the batch {min(missing)} is not called (nor {len(missing) - 1} others of "
            f"{len(costs.calls)} calls); a network that runs otherwise on fewer samples has no fixed times"
        )
    calls = {
        name: replace(
            row,
            fixed_forward_s=_fixed_s(row.forward, part.calls[name].forward, fraction),
            fixed_backward_s=_fixed_s(row.backward, part.calls[name].backward, fraction),
        )
        for name, row in costs.calls.items()
    }
    return replace(costs, calls=calls)


def _fixed_s(whole: TimedRuns | None, part: TimedRuns | None, fraction: float) -> float:
    if whole is None or part is None:
        return 0.0
    fixed_s = (part.median_s - fraction * whole.median_s) / (1 - fraction)
    return min(max(0.0, fixed_s), whole.median_s)
