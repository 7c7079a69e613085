"""How long a training step takes, from what its calls take.

On a CPU a step is the sum of its calls, forward and backward, and of the optimizer's. A GPU works behind the
interpreter's back, so there are two clocks: the host issues one call after the other, and the device does them in
order, each when it is issued and the one before is done. A network of large operations takes the device's time, one
of many small ones the host's:

    host    | issue a | issue b | issue c |
    device            | a |     | b |     | c |        bound by the host: the device waits
    device            | a ......| b ......| c ......|  bound by the device: the host is ahead

What is not in it: the Python code between the calls, which no measurement of single calls sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from outcore.cost.costs import Costs, Source
from outcore.cost.measure import clock_for
from outcore.graph import Graph
from outcore.machine.clock import Timing, time_calls

__all__ = ["StepTime", "measure_optimizer", "predict_step"]

_ORDER: tuple[Source, ...] = ("measured", "analytic", "scaled", "unknown")


@dataclass(frozen=True, slots=True)
class StepTime:
    """A predicted training step, in seconds."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    transfer_s: float
    """Bringing the batch to the device."""
    wait_s: float
    """How long the device waits for the host, in all; 0 on a CPU."""
    source: Source
    """The least trustworthy of what it was made from."""
    unmeasured: tuple[str, ...] = ()
    """Calls that are not in it because their time is not known."""

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.forward_s + self.backward_s + self.optimizer_s + self.transfer_s + self.wait_s

    def __str__(self) -> str:
        parts = ("forward", "backward", "optimizer", "transfer", "wait")
        shown = ", ".join(f"{p} {getattr(self, p + '_s') * 1e3:,.2f}" for p in parts if getattr(self, p + "_s"))
        missing = f"; without {len(self.unmeasured)} calls of unknown time" if self.unmeasured else ""
        return f"step {self.step_s * 1e3:,.2f} ms ({self.source}): {shown}{missing}"


def predict_step(
    graph: Graph,
    costs: Costs,
    *,
    optimizer: Timing | None = None,
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
    backward = [c.backward for c in reversed(order) if c.backward is not None]
    steps = [*forward, *backward, *([optimizer] if optimizer is not None else [])]
    inputs = sum(graph.values[name].bytes for name in graph.inputs)
    transfer_s = inputs / input_bytes_per_s if input_bytes_per_s else 0.0
    busy = sum(t.median_s for t in steps)
    host = device = transfer_s
    for timing in steps:
        host += timing.dispatch_s
        device = max(device, host) + timing.median_s
    sources: set[Source] = {c.time_source for c in order if c.forward is not None} or {"unknown"}
    return StepTime(
        forward_s=sum(t.median_s for t in forward),
        backward_s=sum(t.median_s for t in backward),
        optimizer_s=optimizer.median_s if optimizer is not None else 0.0,
        transfer_s=transfer_s,
        wait_s=max(0.0, device - transfer_s - busy),
        source=max(sources, key=_ORDER.index),
        unmeasured=tuple(c.call for c in order if c.time_source == "unknown"),
    )


def measure_optimizer(
    model: nn.Module,
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    device: torch.device | str | None = None,
    *,
    runs: int = 10,
) -> Timing:
    """Time an optimizer's step on parameters of the model's sizes, made up so that the model does not change.

    Takes the memory of the weights, their gradients and the optimizer's state.
    """
    sizes = [p for p in {id(p): p for p in model.parameters()}.values() if p.requires_grad]
    where = torch.device(device) if device is not None else (sizes[0].device if sizes else torch.device("cpu"))
    made = [nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=where).uniform_(-1, 1)) for p in sizes]
    if not made:
        return Timing.of([0.0])
    for param in made:
        param.grad = torch.full_like(param, 1e-3)
    optimizer = make(made)
    return time_calls(optimizer.step, where, seconds=0.2, warmup=2, most=runs, clock=clock_for(where))
