"""How long a training step takes, from what its calls take.

On a CPU a step is the sum of its calls, forward and backward, and of the optimizer's. A GPU works asynchronously, so
there are two clocks: the host launches one call after the other, and the device runs them in order, each when it is
launched and the one before is done. A network of large operations takes the device's time, one of many small ones the
host's:

    host    | launch a | launch b | launch c |
    device             | a |      | b |      | c |       bound by the host: the device waits
    device             | a .......| b .......| c ......| bound by the device: the host is ahead

A value that several calls read gets several gradients, which autograd adds up: one more pass over memory for each
beyond the first, part of no call (`Costs.sum_bytes_per_s`, and `sum_dispatch_s` of the host).

Between the calls the host also runs the modules around them, the user's Python and autograd's bookkeeping:
`Costs.between_s` per call and direction, measured on a small network (`outcore.cost.measured.host_time`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from outcore.cost.costs import Costs, Source
from outcore.cost.measured.host_speed import reference_work_s
from outcore.graph import Graph
from outcore.machine.clock import TimedRuns, clock_for, time_calls, wall_s

_ORDER: tuple[Source, ...] = ("measured", "analytic", "scaled", "unknown")


@dataclass(frozen=True, slots=True)
class StepTime:
    """A predicted training step, in seconds."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    transfer_s: float
    """Copying the batch to the device."""
    wait_s: float
    """How long the device waits for the host, in all; on a CPU what lies between the calls."""
    source: Source
    """The least trustworthy source of the times in it."""
    unmeasured: tuple[str, ...] = ()
    """Calls that are not in it because their time is not known."""
    less_s: float = 0.0
    more_s: float = 0.0
    """How much more it may be (and `less_s` how much less), if different calls err independently: of an estimate where
    four in five lie, of a measurement from the fastest to the slowest runs."""

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.forward_s + self.backward_s + self.optimizer_s + self.transfer_s + self.wait_s

    @property
    def interval_s(self) -> tuple[float, float]:
        """The bounds between which the step should lie."""
        return max(0.0, self.step_s - self.less_s), self.step_s + self.more_s

    def __str__(self) -> str:
        parts = ("forward", "backward", "optimizer", "transfer", "wait")
        shown = ", ".join(f"{p} {getattr(self, p + '_s') * 1e3:,.2f}" for p in parts if getattr(self, p + "_s"))
        missing = f"; without {len(self.unmeasured)} calls of unknown time" if self.unmeasured else ""
        return f"step {self.step_s * 1e3:,.2f} ms ({self.source}): {shown}{missing}"


def predict_step(
    graph: Graph,
    costs: Costs,
    *,
    optimizer: TimedRuns | None = None,
    input_bytes_per_s: float | None = None,
) -> StepTime:
    """The time of a training step from the times of its calls.

    Args:
        graph: the network.
        costs: its costs, with times.
        optimizer: what the optimizer's step takes, from `measure_optimizer`; none for no optimizer.
        input_bytes_per_s: rate at which the batch is brought to the device; none if it is there already.
    """
    order = [costs.calls[name] for name in graph.calls]
    forward = [c.forward for c in order if c.forward is not None]
    summed = backward_with_sums(graph, costs)
    backward = list(summed.values())
    kinds = [(c.type, c.forward) for c in order if c.forward is not None]
    kinds += [(costs.calls[name].type, timing) for name, timing in summed.items()]
    kinds += [("optimizer", optimizer)] if optimizer is not None else []
    inputs = sum(graph.values[name].bytes for name in graph.inputs)
    transfer_s = inputs / input_bytes_per_s if input_bytes_per_s else 0.0
    sources: set[Source] = {c.time_source for c in order if c.forward is not None} or {"unknown"}
    return StepTime(
        forward_s=sum(t.median_s for t in forward),
        backward_s=sum(t.median_s for t in backward),
        optimizer_s=optimizer.median_s if optimizer is not None else 0.0,
        transfer_s=transfer_s,
        wait_s=_wait_s(forward, backward, optimizer, costs),
        source=max(sources, key=_ORDER.index),
        unmeasured=tuple(c.call for c in order if c.time_source == "unknown"),
        less_s=summed_spread_s((kind, t.median_s, t.median_s - t.min_s) for kind, t in kinds),
        more_s=summed_spread_s((kind, t.median_s, t.max_s - t.median_s) for kind, t in kinds),
    )


def summed_spread_s(spreads: Iterable[tuple[str, float, float]]) -> float:
    """How far the sum of times may lie to one side: equal work errs alike, different work independently.

    Args:
        spreads: of each, what it is, what it takes, and how far that may be off to this side.

    >>> summed_spread_s([("Conv2d", 1.0, 0.3), ("ReLU", 1.0, 0.4)]), summed_spread_s([("ReLU", 1.0, 0.4)] * 2)
    (0.5, 0.8)
    """
    alike: dict[tuple[str, float], float] = {}
    for kind, time_s, width_s in spreads:
        alike[kind, time_s] = alike.get((kind, time_s), 0.0) + max(0.0, width_s)
    return math.sqrt(sum(width_s**2 for width_s in alike.values()))


def backward_with_sums(graph: Graph, costs: Costs) -> dict[str, TimedRuns]:
    """Backward by call, in its order; the time of a call that makes a further gradient of a value includes the sum.

    Two are read and one is written for each gradient beyond the first of a value.
    """
    found, received = dict[str, TimedRuns](), set[str]()
    for name in reversed(list(graph.calls)):
        cost = costs.calls[name]
        reached = [g.of for g in cost.gradients if g.of in graph.values]
        again = [of for of in reached if of in received]
        received.update(reached)
        if cost.backward is None:
            continue
        timing = cost.backward
        if again and costs.sum_bytes_per_s:
            more_s = sum(3 * graph.values[of].bytes for of in again) / costs.sum_bytes_per_s
            issuing_s = timing.dispatch_s + len(again) * costs.sum_dispatch_s
            timing = replace(timing.longer(more_s), dispatch_s=issuing_s)
        found[name] = timing
    return found


def _wait_s(forward: list[TimedRuns], backward: list[TimedRuns], optimizer: TimedRuns | None, costs: Costs) -> float:
    """The time in which the device is idle because the host has not launched the next call yet."""
    if not any(timing.dispatch_s for timing in (*forward, *backward)):  # a CPU, where launching is part of running
        return costs.between_s * (len(forward) + len(backward))
    host = device = busy = 0.0
    for calls, start_s in ((forward, 0.0), (backward, costs.start_s)):
        host += start_s if calls else 0.0
        for timing in calls:
            host += timing.dispatch_s + costs.between_s
            device = max(device, host) + timing.median_s
            busy += timing.median_s
    if optimizer is not None:  # many kernels: the device begins long before the host has issued the last
        begin = max(device, host + optimizer.lead_s)
        device = max(begin + optimizer.median_s, host + optimizer.dispatch_s)
        busy += optimizer.median_s
    return max(0.0, device - busy)


def measure_optimizer(
    model: nn.Module,
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    device: torch.device | str | None = None,
    *,
    runs: int = 10,
    reference: float = 0.0,
) -> TimedRuns:
    """Time an optimizer's step on parameters of the model's sizes, made up so that the model does not change.

    Takes the memory of the weights, their gradients and the optimizer's state. With `reference` the launch time is
    given for a host with that time of the reference work (`Costs.beat_s`).
    """
    sizes = [p for p in {id(p): p for p in model.parameters()}.values() if p.requires_grad]
    where = torch.device(device) if device is not None else (sizes[0].device if sizes else torch.device("cpu"))
    made = [nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=where).uniform_(-1, 1)) for p in sizes]
    if not made:
        return TimedRuns.of([0.0])
    for param in made:
        param.grad = torch.full_like(param, 1e-3)
    optimizer = make(made)
    before = reference_work_s() if reference else 0.0
    timing = time_calls(optimizer.step, where, seconds=0.2, warmup=2, most=runs, clock=clock_for(where))
    if where.type == "cuda":
        from_idle_s = statistics.median(wall_s(optimizer.step, where) for _ in range(5))
        timing = replace(timing, lead_s=max(0.0, from_idle_s - timing.median_s))
    scale = 2 * reference / (before + reference_work_s()) if reference else 1.0
    return replace(timing, dispatch_s=timing.dispatch_s * scale, lead_s=timing.lead_s * scale)
