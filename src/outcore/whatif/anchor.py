"""Two numbers of a real step correct a predicted one: its time, and how long the device computed in it.

A prediction is off by some factor on the device and by another on the host, and a what-if asks for a difference. So
where a step was run, the tasks of the device are scaled to the time that it really computed, and those of the host so
that the simulated step takes as long as the real one. The same two factors then hold for every variant of the step. A
step that the device alone explains says nothing of the host, which keeps its prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outcore.whatif.recorded_step import RecordedStep

__all__ = ["Anchor"]

_LEAST, _MOST = 0.2, 5.0
_EXPLAINED = 1.06
"""A step that takes so little more than the device computes says nothing of the host."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """The factors between a predicted and a real step."""

    device: float = 1.0
    host: float = 1.0

    @classmethod
    def of(cls, step: RecordedStep, step_s: float, busy_s: float | None = None, issue_s: float | None = None) -> Anchor:
        """The factors with which a simulated step takes what a real one took.

        Args:
            step: as recorded.
            step_s: the real step.
            busy_s: how long the device computed in it; not known on a CPU, where it is the step.
            issue_s: how long the host needed to launch it all; without it the host's factor is found from the step,
                if the device does not explain that.
        """
        simulated = step.simulate()
        if "host" not in step.resources:
            return cls(device=step_s / simulated.step_s if simulated.step_s else 1.0)
        own_s = simulated.busy_s("device")
        device = _bounded(busy_s / own_s) if busy_s and own_s else 1.0
        low, high = _LEAST, _MOST

        def at(host: float) -> float:
            return cls(device, host).apply(step).simulate().step_s

        if issue_s is not None and simulated.busy_s("host"):
            return cls(device, _bounded(issue_s / simulated.busy_s("host")))
        if step_s <= _EXPLAINED * max(busy_s or 0.0, at(low)):  # the device explains it, whatever the host does
            return cls(device, min(1.0, _host_bound(at, step_s)))
        if at(high) <= step_s:
            return cls(device, high)
        while high - low > 1e-3:
            middle = (low + high) / 2
            low, high = (middle, high) if at(middle) < step_s else (low, middle)
        return cls(device, high)

    def apply(self, step: RecordedStep) -> RecordedStep:
        """A step with these factors."""
        factors = {"device": self.device, "host": self.host}
        tasks = {n: t.scaled(factors.get(t.resource, 1.0)) for n, t in step.tasks.items()}
        return replace(step, tasks=tasks)


def _host_bound(at: Callable[[float], float], step_s: float) -> float:
    """The largest factor of the host with which the step still takes no longer than the device explains."""
    low, high = _LEAST, _MOST
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) <= _EXPLAINED * step_s else (low, middle)
    return low


def _bounded(factor: float) -> float:
    return min(_MOST, max(_LEAST, factor))
