"""Pipelines of what-if: what a part of the batch takes too, and what questions about tasks make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.errors import WhatIfError
from outcore.machine import parse
from outcore.machine.link import Link
from outcore.whatif import pipelines
from outcore.whatif.elsewhere import measured_here, record_on
from outcore.whatif.links import ClusterLink, parse_link
from outcore.whatif.recording import record_setup
from outcore.whatif.scaling import scale_out
from outcore.whatif.scaling_table import ScalingPoint
from outcore.whatif.setup import TrainingSetup
from outcore.whatif.techniques import parse_techniques
from tests.whatif.jobs import images

V100 = parse("v100").devices[0]
CPU = replace(V100, kind="cpu", name="slow", dispatch_s=20e-6)
FAST = ClusterLink("fast", Link.symmetric(bandwidth_bytes_per_s=1e12, latency_s=1e-7))


def small(size: int = 32) -> outcore.Job:
    """Many calls that take what launching them takes."""
    return outcore.Job(
        model=lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(16))),
        batch=lambda n: (torch.randn(n, 16), torch.randn(n, 16)),
        loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        size=size,
    )


def asked(job: outcore.Job, text: str = "", how: str = "gpipe", mode: str = "weak") -> dict[int, ScalingPoint]:
    techniques = tuple(t.on(V100) for t in parse_techniques(text)) if text else ()
    found = scale_out(job, [1, 2], FAST, device=CPU, strategies=(how,), techniques=techniques, mode=mode)  # type: ignore[arg-type]
    return {point.gpus: point for point in found.points}


def test_small_calls_are_not_divided_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    known = asked(small())[2]
    monkeypatch.setattr(pipelines, "with_part", lambda costs, batch, costs_of: costs)
    blind = asked(small())[2]
    assert known.step_s > blind.step_s and known.said != blind.said


@pytest.mark.parametrize("size", [1, 3, 7, 13])
def test_odd_batches_are_asked_like_others(size: int) -> None:
    assert asked(small(size))[2].step_s > 0


class Halved(nn.Module):
    """Takes an even number of samples alone, and another way for few."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] % 2:
            raise ValueError("an odd batch")
        return self.second(self.first(x) if x.shape[0] > 8 else x.relu())


def test_a_network_that_cannot_take_a_part_is_planned_without() -> None:
    assert asked(replace(small(12), model=Halved))[2].step_s > 0


def test_questions_about_tasks_reach_the_stages_of_a_pipeline() -> None:
    plain = asked(images(64))[2].step_s
    assert asked(images(64), "conv:0.1x")[2].step_s < 0.9 * plain
    assert asked(images(64), "conv:2x")[2].step_s > 1.1 * plain
    assert asked(images(64), "3=free")[2].step_s < plain


def test_what_no_stage_is_known_to_do_is_refused_and_named() -> None:
    job, link = images(8), parse_link("25gbe")
    techniques = parse_techniques("graphs")
    found = scale_out(job, [2], link, device=V100, strategies=("data_parallel", "1f1b"), techniques=techniques)
    assert {point.strategy for point in found.points} == {"data_parallel"}
    assert found.refused == ("1f1b: what graphs makes of a pipeline's stages is not known",)
    with pytest.raises(WhatIfError, match="none of it can be done: 1f1b"):
        scale_out(job, [2], link, device=V100, strategies=("1f1b",), techniques=techniques)


@pytest.mark.parametrize("mode", ["weak", "strong"])
def test_another_batch_is_divided_as_the_job_s_own_would_be(mode: str) -> None:
    for how in ("data_parallel", "gpipe"):
        other, own = asked(images(8), "batch=32", how, mode), asked(images(32), "", how, mode)
        assert other == own and other[1].efficiency == pytest.approx(1.0)


def test_a_message_takes_its_hosts() -> None:
    busy = replace(FAST, link=replace(FAST.link, host_s=5e-3))
    free_s, busy_s = (
        scale_out(small(), [2], link, device=CPU, strategies=("1f1b",)).points[0].step_s for link in (FAST, busy)
    )
    assert busy_s > free_s + 2 * 2 * 5e-3 * 0.9 and busy.faster(2).link.host_s == 5e-3


def test_measuring_is_carried_to_devices_of_its_kind() -> None:
    setup = TrainingSetup(small(8))
    measured = record_setup(setup, CPU)
    assert record_on(setup, CPU, here=measured) is measured
    with pytest.raises(WhatIfError, match="say nothing of"):
        measured_here(CPU, V100)
    recorded = measured_here(CPU, CPU, time_limit_s=0.2)(setup)
    assert all(cost.time_source == "measured" for cost in recorded.profile.costs.calls.values() if cost.forward)


def test_every_rank_s_batch_is_measured_where_that_is_asked_for() -> None:
    seen: list[int] = []

    def recorder(setup: TrainingSetup) -> object:
        seen.append(setup.batch)
        return record_on(setup, CPU)

    scale_out(small(8), [1, 2], FAST, device=CPU, strategies=("gpipe",), base=recorder)  # type: ignore[arg-type]
    assert seen == [8, 16, 2]  # one rank's batch, that of both, and an eighth of it
