"""What is said of a step and what sets its pace; and setups that train as a plain loop does."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import WhatIfError
from outcore.machine import parse
from outcore.whatif.answer import reason_of
from outcore.whatif.elsewhere import record_on
from outcore.whatif.recording import fused_cost, record_setup
from outcore.whatif.setup import TrainingSetup, fused, in_channels_last
from outcore.whatif.trial import _summed, _training_step, run_setup
from tests.whatif.jobs import images


def test_channels_are_innermost_in_weights_and_images_and_nowhere_else() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 2), nn.Conv3d(2, 4, 3))
    assert in_channels_last(net) is net
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last) and not net[0].weight.is_contiguous()
    assert net[2].weight.is_contiguous(memory_format=torch.channels_last_3d) and net[1].weight.is_contiguous()
    image, labels, word = torch.rand(2, 3, 4, 4), torch.zeros(2, 3, 4, 4, dtype=torch.long), "text"
    turned = in_channels_last({"a": [image, labels], "b": word})
    assert turned["a"][0].is_contiguous(memory_format=torch.channels_last) and torch.equal(turned["a"][0], image)
    assert turned["a"][1].is_contiguous() and turned["b"] == word


def test_an_optimizer_has_a_fused_form_or_is_refused() -> None:
    made = fused(lambda p: torch.optim.Adam(p, 0.1))([nn.Parameter(torch.ones(2))])
    assert all(group["fused"] and not group["foreach"] for group in made.param_groups) and made.defaults["fused"]
    with pytest.raises(WhatIfError, match="torch has no fused RMSprop"):
        fused(torch.optim.RMSprop)([nn.Parameter(torch.ones(2))])


def test_a_step_that_is_timed_is_a_step_of_plain_training() -> None:
    kept: list[nn.Module] = []
    job = images(4)

    def model() -> nn.Module:
        torch.manual_seed(1)
        kept.append(job.model())
        return kept[-1]

    def batch(size: int) -> Any:
        torch.manual_seed(2)
        return job.batch(size)

    step = _training_step(TrainingSetup(replace(job, model=model, batch=batch)), torch.device("cpu"))
    mine = kept[-1]
    plain, (x, y) = model(), batch(4)
    optimizer = torch.optim.Adam(plain.parameters())
    for _ in range(2):
        step()
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_without_a_loss_all_that_has_a_gradient_is_summed_up() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert float(_summed({"a": [a], "b": b, "c": torch.ones(9), "d": None}).detach()) == 5.0
    with pytest.raises(WhatIfError, match="nothing that has a gradient"):
        _summed([torch.ones(1)])


def test_a_trial_says_how_many_steps_it_timed_and_what_cannot_be_timed_here() -> None:
    trial = run_setup(TrainingSetup(images(2)), "cpu", seconds=0.05)
    assert trial.steps >= 5 and trial.fastest_s <= trial.step_s <= trial.slowest_s and trial.device == "cpu"
    assert trial.step_s > 0  # also by a clock that stands still for milliseconds
    assert trial.busy_s is None and trial.peak_bytes is None
    with pytest.raises(WhatIfError, match="CUDA graphs need a GPU"):
        run_setup(replace(TrainingSetup(images(2)), cuda_graph=True), "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(WhatIfError, match="no GPU here"):
            run_setup(TrainingSetup(images(2)), "cuda")


def test_steps_shorter_than_the_tick_of_the_clock_still_take_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = itertools.count()
    monkeypatch.setattr("outcore.whatif.trial.time.process_time", lambda: 0.004 * (next(asked) // 10))
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    trial = run_setup(TrainingSetup(images(2)), "cpu", seconds=0.05)
    assert trial.fastest_s == 0 and 0 < trial.step_s < 0.004


def test_what_was_measured_here_is_carried_to_another_gpu_and_not_to_a_cpu() -> None:
    v100, a100, cpu = (parse(name).devices[0] for name in ("v100", "a100", "v100"))
    cpu = replace(cpu, kind="cpu", name="cpu")
    setup = TrainingSetup(images(64))
    slow = record_setup(setup, replace(v100, bandwidth_bytes_per_s=v100.bandwidth_bytes_per_s / 10))
    mine, estimated = record_on(setup, a100, here=slow), record_on(setup, a100)
    assert mine.device == estimated.device == a100
    assert mine.step.simulate().step_s != estimated.step.simulate().step_s
    with pytest.raises(WhatIfError, match="say nothing of cpu"):
        record_on(setup, cpu, here=slow)
    assert record_on(setup, slow.device, here=slow) is slow


def test_what_a_step_is_bound_by_is_said_of_the_step_itself_and_of_a_change() -> None:
    gpu = record_setup(TrainingSetup(images(4)), parse("h200").devices[0]).step
    before, after = gpu.simulate(), gpu.scale([n for n, t in gpu.tasks.items() if t.resource == "host"], 0.5).simulate()
    assert reason_of(before, before, same=True).startswith(f"the {before.bound_by} sets the pace: ")
    changed = reason_of(before, after)
    assert changed.startswith("launches ") and " → " in changed and "device work" not in changed
    assert reason_of(before, before) == f"nothing that counts changes; the {before.bound_by} sets the pace"
    cpu = record_setup(
        TrainingSetup(images(4)), replace(parse("v100").devices[0], kind="cpu", name="cpu")
    ).step.simulate()
    assert reason_of(cpu, cpu, same=True).startswith("one clock: ") and "work on the processor" in reason_of(cpu, cpu)


def test_a_fused_optimizer_reads_and_writes_all_once() -> None:
    plain = OptimizerCost.of(torch.optim.Adam, "cuda")
    one = fused_cost(plain)
    assert one.operations == 1 and one.together and one.traffic_per_parameter == 3 + 2 * plain.state_per_parameter
    assert one.workspace_per_parameter == one.workspace_per_largest == 0 and plain.operations > 1


def test_answers_in_words_have_a_line_for_each_question() -> None:
    found = outcore.whatif.ask(images(4), ["batch=8", "relu:0.9x"], device=parse("h200").devices[0])
    first, *rows = str(found).splitlines()
    assert first == f"images on {found.device}, batch 4" and len(rows) == 3
    for row, answer in zip(rows, (found.base, *found.answers), strict=True):
        assert row.startswith(f"  {answer.question}: ") and f", {answer.gain:.2f}x: {answer.reason}" in row
