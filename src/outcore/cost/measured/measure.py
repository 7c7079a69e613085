"""Time every call of a network in isolation.

Calls are taken one at a time, so a network that does not fit on the device is measured all the same as long as each of
its calls fits, and a call that does not is measured on a smaller image or batch and scaled. Equal calls are measured
once. What costs most is measured first: when the time is up or the user interrupts, the rest is small, and what was
measured is kept.

How one call is timed is in `outcore.cost.measured.bench`. What the host does between the calls is measured on a network
of small layers (`outcore.cost.measured.host_time`), the cost of adding up gradients on two tensors
(`GradientSumCost`): a value that several calls read gets several gradients, and no call contains their sum. So the rate
of the device and the host's launch time at its speed then are found once per device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch

from outcore.cost.costs import CallCost, Costs
from outcore.cost.measured.bench import CallBench
from outcore.cost.measured.cache_state import CacheState
from outcore.cost.measured.host_speed import reference_work_s
from outcore.cost.measured.host_time import between_calls
from outcore.cost.measured.saved_bytes import device_of, quietly
from outcore.errors import MachineError
from outcore.graph import Graph
from outcore.graph.record.preserve import preserved
from outcore.machine.clock import clock_for, time_calls

Progress = Callable[[int, int, str], None]
"""Called with the number of measured calls, the number of all, and the name of the next."""

_MOST_RUNS = 30


def measure(
    graph: Graph,
    device: torch.device | str | None = None,
    *,
    time_limit_s: float = 60.0,
    memory_limit_bytes: int | None = None,
    runs: int = _MOST_RUNS,
    accounted: Costs | None = None,
    progress: Progress | None = None,
    between: bool = True,
) -> Costs:
    """Measure what every call of a network takes on a device: time forward and backward, bytes, FLOPs.

    >>> import outcore, torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
    >>> costs = measure(outcore.capture(net, [(1, 3, 32, 32)]), "cpu", time_limit_s=5)
    >>> costs["0#0"].time_source
    'measured'

    Args:
        graph: as captured, with its model; the model is not changed and may be on another device, or on ``meta``.
        device: where to measure; by default where the model is.
        time_limit_s: when it is used up, what is left stays without a time, with that as the reason; on a GPU it is
            still run twice for the memory that libraries take, for as long again at most.
        memory_limit_bytes: no call takes more than this; larger ones are measured smaller and scaled. By default nine
            tenths of what is free on a GPU, on a CPU a gibibyte.
        runs: how often a call is run at most.
        accounted: bytes and FLOPs from `outcore.cost.account` for the same device, if they are known already.
        progress: called before each measurement.
        between: whether what the host does between calls is measured too, once per device and process.
    """
    target = torch.device(device) if device is not None else device_of(graph)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise MachineError("there is no GPU here to measure on; use outcore.estimate with a machine from the catalogue")
    costs = _measure(graph, target, time_limit_s, memory_limit_bytes, runs, accounted, progress)

    def isolated(small: Graph) -> Costs:
        return _measure(small, target, 5.0, None, 10, None, None)

    adding = GradientSumCost.on(target)
    return replace(
        costs,
        between_s=between_calls(target, isolated, clock_for(target), costs.beat_s) if between else costs.between_s,
        sum_bytes_per_s=adding.bytes_per_s,
        sum_dispatch_s=adding.issued_s(costs.beat_s),
    )


def _measure(
    graph: Graph,
    target: torch.device,
    time_limit_s: float,
    memory_limit_bytes: int | None,
    runs: int,
    accounted: Costs | None,
    progress: Progress | None,
) -> Costs:
    """The cost of every isolated call, without what is between them."""
    bench = CallBench(graph, target, memory_limit_bytes, runs, accounted)
    groups: dict[Hashable, list[str]] = {}
    for name in graph.calls:
        groups.setdefault(bench.likeness(name), []).append(name)
    order = sorted(groups.values(), key=lambda names: -bench.weight(names[0]))
    end = time.monotonic() + time_limit_s
    share_s = min(0.1, 0.4 * time_limit_s / max(1, len(order)))
    found: dict[str, CallCost] = {}
    memory_only: dict[str, CallCost] = {}
    """Calls that were not timed, for lack of time, but whose memory is still measured: a peak without the workspaces of
    libraries would be useless."""
    notes = list(bench.costs.notes)
    with preserved(graph.module.model, contents=False), quietly():
        bench.cache_state.hold()
        try:
            for done, names in enumerate(order):
                if time.monotonic() > end:
                    notes.append(f"the time limit of {time_limit_s:g} s was reached after {done} of {len(order)} calls")
                    break
                if progress is not None:
                    progress(done, len(order), names[0])
                found[names[0]] = bench.time(names[0], share_s)
            for names in order[len(found) :]:
                if time.monotonic() > end + max(2.0, time_limit_s):
                    break
                memory_only[names[0]] = bench.memory_only(names[0])
        except KeyboardInterrupt:
            notes.append(f"interrupted after {len(found)} of {len(order)} calls")
        finally:
            bench.cache_state.release()
        if progress is not None:
            progress(len(found), len(order), "")
    reason = "" if len(found) == len(order) else notes[-1]
    found = {name: bench.finished(cost) for name, cost in found.items()} | {
        name: replace(cost, reason=reason) for name, cost in memory_only.items()
    }
    timed = {name: found.get(names[0]) for names in groups.values() for name in names}
    calls = {name: _with_time(cost, timed[name], reason) for name, cost in bench.costs.calls.items()}
    return replace(
        bench.costs,
        calls=calls,
        notes=tuple(notes),
        library_bytes=bench.library_bytes(),
        start_s=bench.start_s(),
        beat_s=bench.host_speed.reference_s,
    )


def _with_time(cost: CallCost, timed: CallCost | None, reason: str) -> CallCost:
    """A cost under its own name with the time of the equal call that was measured."""
    if timed is None:
        return replace(cost, reason=reason)
    return replace(
        cost,
        forward=timed.forward,
        backward=timed.backward,
        time_source=timed.time_source,
        reason=timed.reason,
        workspace_forward_bytes=timed.workspace_forward_bytes,
        workspace_backward_bytes=timed.workspace_backward_bytes,
        workspace_source=timed.workspace_source,
    )


@dataclass(frozen=True, slots=True)
class GradientSumCost:
    """The cost of adding one gradient to another."""

    bytes_per_s: float
    """The rate of what is read and written: three times the gradient."""
    dispatch_s: float
    reference_s: float
    """The time of the reference work when it was launched."""

    @staticmethod
    @functools.cache
    def on(device: torch.device) -> GradientSumCost:
        """Measured on a device."""
        count = 2**24 if device.type == "cuda" else 2**20
        a, b = torch.ones(count, device=device), torch.ones(count, device=device)
        between = CacheState(device).before([a])
        before = reference_work_s()
        timing = time_calls(lambda: a.add_(b), device, seconds=0.02, clock=clock_for(device), between=between)
        return GradientSumCost(12.0 * count / timing.median_s, timing.dispatch_s, (before + reference_work_s()) / 2)

    def issued_s(self, reference: float) -> float:
        """The launch time of a sum on a host that takes `reference` for the reference work."""
        return self.dispatch_s * reference / self.reference_s if reference else self.dispatch_s
