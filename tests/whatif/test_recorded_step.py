"""A step of tasks: two simulators agree, the primitives do what they say, and unchanged it is what profile predicts."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from outcore.cost.predicted.step_time import predict_step
from outcore.errors import WhatIfError
from outcore.machine import parse
from outcore.whatif import RecordedStep, Task
from outcore.whatif.clocks import _by_events, _in_order
from outcore.whatif.recording import record_setup
from outcore.whatif.setup import TrainingSetup
from tests.whatif.jobs import images


def drawn(seed: int, resources: tuple[str, ...] = ("host", "device", "link")) -> RecordedStep:
    """A random step in which every task waits for some that stand before it."""
    source = random.Random(seed)
    tasks: list[Task] = []
    for number in range(source.randint(1, 30)):
        before = [t.name for t in tasks]
        after = tuple(source.sample(before, k=min(len(before), source.randint(0, 3))))
        time_s = source.choice([0.0, 1.0, 2.0, source.random()])
        tasks.append(Task(f"t{number}", source.choice(resources), time_s, after))
    return RecordedStep.of(tasks)


@pytest.mark.parametrize("seed", range(200))
def test_one_pass_and_events_give_the_same_times(seed: int) -> None:
    step = drawn(seed)
    one_pass = _in_order(step)
    events = _by_events(step)
    assert one_pass is not None and one_pass.keys() == events.keys()
    for name, span in one_pass.items():
        assert events[name] == pytest.approx(span)


@pytest.mark.parametrize("seed", range(100))
def test_no_resource_does_two_things_and_nothing_begins_too_early(seed: int) -> None:
    step = drawn(seed)
    if "link" in step.resources:
        step = step.reschedule("link", lambda task: -int(task.name[1:]))
    found = step.simulate()
    for resource in step.resources:
        spans = sorted(found.spans[n] for n in step.select(resource=resource))
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(spans))
    for task in step.tasks.values():
        assert all(found.spans[needed][1] <= found.spans[task.name][0] for needed in task.after)


@pytest.mark.parametrize("seed", range(100))
def test_removing_is_at_least_as_good_as_making_free_and_keeps_the_order_of_the_rest(seed: int) -> None:
    step, source = drawn(seed), random.Random(seed)
    gone = [n for n in step.tasks if source.random() < 0.3]
    left = step.remove(gone)
    assert left.simulate().step_s <= step.scale(gone, 0.0).simulate().step_s + 1e-9
    reached = _reached(step)
    for name, task in left.tasks.items():
        assert not set(task.after) & set(gone)
        assert {n for n in reached[name] if n not in gone} == _reached(left)[name]


def _reached(step: RecordedStep) -> dict[str, set[str]]:
    """By task: all that it waits for, at any distance."""
    found: dict[str, set[str]] = {}
    for name, task in step.tasks.items():
        found[name] = set(task.after).union(*(found[n] for n in task.after))
    return found


@pytest.mark.parametrize("seed", range(50))
def test_the_critical_chain_has_no_gap(seed: int) -> None:
    found = drawn(seed).simulate()
    assert sum(found.critical_s().values()) == pytest.approx(found.step_s)


def test_inserting_before_a_task_delays_it() -> None:
    step = RecordedStep.of([Task("a", "device", 1.0), Task("b", "device", 1.0, ("a",))])
    longer = step.insert(Task("c", "link", 5.0, ("a",)), before=["b"])
    assert longer.simulate().step_s == 7.0
    assert step.insert(Task("c", "device", 5.0), place="b").simulate().spans["b"] == (6.0, 7.0)


def test_priority_decides_which_ready_task_a_link_takes() -> None:
    tasks = [Task("big", "link", 4.0), Task("urgent", "link", 1.0), Task("use", "device", 3.0, ("urgent",))]
    step = RecordedStep.of(tasks)
    assert step.simulate().step_s == 8.0
    assert step.reschedule("link", lambda t: t.time_s).simulate().step_s == 5.0


def test_exposed_time_is_what_the_device_does_not_cover() -> None:
    tasks = [Task("a", "device", 2.0), Task("send", "link", 5.0), Task("b", "device", 1.0, ("send",))]
    assert RecordedStep.of(tasks).simulate().exposed_s("link") == 3.0


def test_a_circle_and_unknown_names_are_refused() -> None:
    circle = RecordedStep({"a": Task("a", "device", 1.0, ("b",)), "b": Task("b", "link", 1.0, ("a",))})
    with pytest.raises(WhatIfError, match="waits for itself"):
        circle.simulate()
    with pytest.raises(WhatIfError, match="not a task"):
        RecordedStep.of([Task("a", "device", 1.0, ("nobody",))])
    with pytest.raises(WhatIfError, match="names must differ"):
        RecordedStep.of([Task("a", "device", 1.0), Task("a", "device", 1.0)])
    step = RecordedStep.of([Task("a", "device", 1.0, block="layer1.conv", kind="Conv2d")])
    with pytest.raises(WhatIfError, match="did you mean layer1"):
        step.select(block="layer2")
    with pytest.raises(WhatIfError, match="Conv2d"):
        step.select(kind="cnov")
    with pytest.raises(WhatIfError, match="no task"):
        step.remove(["x"])
    with pytest.raises(WhatIfError, match="at least 0"):
        step.scale(["a"], -1)


@pytest.mark.parametrize("gpu", ["h200", "v100"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_unchanged_a_step_takes_what_profile_predicts(gpu: str, autocast: torch.dtype | None) -> None:
    found = record_setup(TrainingSetup(images(), autocast=autocast), parse(gpu).devices[0])
    expected = predict_step(found.profile.graph, found.profile.costs, optimizer=found.optimizer)
    assert found.step.simulate().step_s == pytest.approx(expected.step_s, rel=1e-9)
