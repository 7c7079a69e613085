"""What of a call's time is the same for a part of the batch.

A pipeline runs a batch in micro-batches, and not all time shrinks with them: weights are read for however few samples,
small convolutions leave vector units and caches half used, Python and the framework cost the same for any size. So the
calls are known twice, with the whole batch and with a part of it, by the same means (measured, or estimated), and a
straight line is laid through the two:

    seconds of a fraction f  =  fixed + (whole - fixed) f

On four images a convolution of a few channels takes up to twice the eighth of what it takes on 32. A part that took
more than the whole is noise, and counts as the whole; one that took less than its share has nothing fixed.

`batch_costs` is where costs for a pipeline come from. A batch of one sample, a network that cannot take a part of its
batch, or runs something else on it, has no fixed times, and is planned without: nobody asked for that part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from outcore.cost.costs import Costs
from outcore.cost.measured.measure import measure
from outcore.cost.predicted.estimate import estimate
from outcore.errors import MachineError, OutcoreError
from outcore.graph import Graph
from outcore.graph.record.part_of_batch import batch_size, capture_part
from outcore.machine import Device, Machine
from outcore.machine.clock import TimedRuns
from outcore.machine.probe import remembered

__all__ = ["batch_costs", "parts_of", "with_fixed_times", "with_part"]

_PART = 8
"""The part is an eighth of the batch if that is a whole number of samples."""
_PART_OF_TIME = 0.25
"""Share of the time for measuring a batch that its part is given beside it."""


def batch_costs(graph: Graph, machine: Machine | Device, *, measure_s: float | None = None) -> Costs:
    """The costs of a batch for plans that may divide it: with what of every call's time is fixed, if that can be known.

    Args:
        graph: recorded with the whole batch.
        machine: what it would run on; of several devices the first counts.
        measure_s: run every call alone, here, for about so many seconds; estimate if not given.

    Raises:
        MachineError: there is no such device here to measure on.
    """
    if measure_s is None:
        return with_part(
            estimate(graph, machine), batch_size(graph), lambda n: estimate(capture_part(graph, n), machine)
        )
    if not measure_s > 0:
        raise MachineError(f"calls are measured for some seconds, not {measure_s:g}")
    asked = machine if isinstance(machine, Device) else machine.devices[0]
    here = remembered()
    names = [device.name for device in (*here.devices, here.host) if device is not None]
    if asked.name.partition(" (")[0] not in [name.partition(" (")[0] for name in names]:  # whatever cores are given
        raise MachineError(f"calls cannot be measured on {asked.name} from here, which has {names[0]}; estimate them")
    kind = asked.kind
    costs = measure(graph, kind, time_limit_s=measure_s)
    return with_part(
        costs,
        batch_size(graph),
        lambda n: measure(capture_part(graph, n), kind, time_limit_s=_PART_OF_TIME * measure_s),
    )


def with_part(costs: Costs, batch: int, costs_of: Callable[[int], Costs]) -> Costs:
    """The costs of a batch with what of every call's time is fixed; as they are where no part of it can be had.

    Args:
        costs: of every call with the whole batch.
        batch: how many samples that has.
        costs_of: the costs of the same network with so many samples, by the same means; may fail.
    """
    for size in parts_of(batch):
        try:
            return with_fixed_times(costs, costs_of(size), size / batch)
        except Exception:  # the user's own code, with a batch that the user did not ask for
            continue
    return costs


def parts_of(batch: int) -> tuple[int, ...]:
    """Which parts of a batch are tried: an eighth or less, and the next larger one (a batch norm may need two samples).

    >>> parts_of(32), parts_of(12), parts_of(7), parts_of(1)
    ((4, 8), (1, 2), (1,), ())
    """
    sizes = [n for n in range(1, batch // 2 + 1) if batch % n == 0]
    small = [n for n in sizes if n <= batch // _PART] or sizes[:1]
    return tuple(sizes[len(small) - 1 : len(small) + 1])


def with_fixed_times(costs: Costs, part: Costs, fraction: float) -> Costs:
    """The costs of a batch with what of every call's time is fixed.

    Args:
        costs: of every call with the whole batch.
        part: of the same network with a part of the batch, measured or estimated as the whole was.
        fraction: which part, between 0 and 1.

    Raises:
        OutcoreError: the part is of another network.
    """
    if not 0 < fraction < 1:
        raise OutcoreError(f"a part of the batch is a fraction between 0 and 1, not {fraction}")
    if other := costs.calls.keys() ^ part.calls.keys():
        raise OutcoreError(
            f"{min(other)} is called with the whole batch or with a part of it, not with both (nor are "
            f"{len(other) - 1} others beside {len(costs.calls)} calls); a network that runs otherwise on fewer samples "
            "has no fixed times"
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
