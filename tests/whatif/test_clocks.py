"""What is read off a simulated step: what is hidden behind what, and who waits for ever."""

from __future__ import annotations

import random

import pytest

from outcore.errors import WhatIfError
from outcore.machine import find
from outcore.machine.clock import TimedRuns
from outcore.whatif import RecordedStep, Task
from outcore.whatif.carry_over import carry_optimizer
from tests.whatif.test_recorded_step import drawn


def test_who_waits_for_ever_is_named_and_not_who_began() -> None:
    tasks = [Task("begins", "host", 1.0), Task("one", "device", 1.0, ("two",)), Task("two", "link", 1.0, ("one",))]
    with pytest.raises(WhatIfError, match="task 'one' never begins"):
        RecordedStep.of(tasks).simulate()


@pytest.mark.parametrize("seed", range(30))
def test_what_is_not_hidden_is_counted_moment_by_moment(seed: int) -> None:
    source = random.Random(seed)
    step = RecordedStep.of(
        Task(t.name, t.resource, float(source.randint(0, 4)), t.after)
        for t in drawn(seed, ("device", "link")).tasks.values()
    )
    found = step.simulate()

    def at_work(resource: str, moment: int) -> bool:
        spans = [found.spans[name] for name in step.select(resource=resource)]
        return any(begin <= moment and moment + 1 <= end for begin, end in spans)

    moments = range(round(found.step_s))
    assert found.exposed_s("link") == sum(at_work("link", m) and not at_work("device", m) for m in moments)
    assert found.busy_s("link") == sum(at_work("link", m) for m in moments)


def test_an_optimizer_goes_by_the_bandwidth() -> None:
    slow, fast = find("t4").device, find("h200").device
    timing = TimedRuns.of([1e-3, 2e-3, 3e-3])
    ratio = slow.bandwidth_bytes_per_s / fast.bandwidth_bytes_per_s
    assert ratio < 0.1 and carry_optimizer(timing, slow, fast).median_s == pytest.approx(ratio * timing.median_s)
