"""A few numbers of a real step correct a predicted one: its time, how long the device computed in it, how long the host
needed to launch it.

A prediction is off by some factor on the device and by another on the host, and a what-if asks for a difference. So
where a step was run, the tasks of the device are scaled to the time that it really computed, and those of the host to
the time that it needed. The same two factors then hold for every variant of the step.

Where the host was not timed its factor is found from the step, so that the simulated one takes as long, but only as far
as the step says something of it. The device explains most steps of large networks nearly alone, and what little is left
(a library that waits, a clock) would be blamed on the host: of eight networks on one machine, the five whose steps
depend on the host found it 1.5 to 1.7 times as slow as predicted, and one that hardly waits for it 2.8 times. The host
is one machine's, so a factor that other networks have there (`host`) is better than such a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outcore.whatif.recorded_step import RecordedStep

__all__ = ["Anchor"]

_LEAST, _MOST = 0.2, 5.0
_EXPLAINED = 1.06
"""A step that takes so little more than the device computes says nothing of the host."""
_NOISE = 1.1
"""A simulated step that takes so little more than the real one does not contradict a host that was timed."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """The factors between a predicted and a real step."""

    device: float = 1.0
    host: float = 1.0

    @classmethod
    def of(
        cls,
        step: RecordedStep,
        step_s: float,
        busy_s: float | None = None,
        issue_s: float | None = None,
        *,
        host: float | None = None,
    ) -> Anchor:
        """The factors with which a simulated step takes what a real one took.

        Args:
            step: as recorded.
            step_s: the real step.
            busy_s: how long the device computed in it; not known on a CPU, where it is the step.
            issue_s: how long the host needed to launch it all; where the device is so far behind that launches wait for
                it, more than that, so that the step bounds it too.
            host: the host's factor as other steps on the same machine have it, where it was not timed in this one.
        """
        simulated = step.simulate()
        if "host" not in step.resources:
            return cls(device=step_s / simulated.step_s if simulated.step_s else 1.0)
        own_s, launch_s = simulated.busy_s("device"), simulated.busy_s("host")
        device = _bounded(busy_s / own_s) if busy_s and own_s else 1.0

        def at(factor: float) -> float:
            return cls(device, factor).apply(step).simulate().step_s

        known = issue_s / launch_s if issue_s is not None and launch_s else host
        if known is not None:
            known = _bounded(known)
            if issue_s is not None and at(known) > _NOISE * step_s:
                known = _largest(at, step_s)
            return cls(device, known)
        if step_s <= _EXPLAINED * max(busy_s or 0.0, at(_LEAST)):  # the device explains it, whatever the host does
            return cls(device, min(1.0, _largest(at, _EXPLAINED * step_s)))
        return cls(device, _largest(at, step_s))

    def apply(self, step: RecordedStep) -> RecordedStep:
        """A step with these factors."""
        factors = {"device": self.device, "host": self.host}
        tasks = {n: t.scaled(factors.get(t.resource, 1.0)) for n, t in step.tasks.items()}
        return replace(step, tasks=tasks)


def _largest(at: Callable[[float], float], step_s: float) -> float:
    """The largest factor of the host with which the step takes no longer than this."""
    low, high = _LEAST, _MOST
    if at(high) <= step_s:
        return high
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) <= step_s else (low, middle)
    return low


def _bounded(factor: float) -> float:
    return min(_MOST, max(_LEAST, factor))
