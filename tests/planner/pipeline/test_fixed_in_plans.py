"""Plans are made with what a part of the batch takes too, wherever their costs are made inside of the call."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.costs import Costs
from outcore.cost.predicted.estimate import estimate
from outcore.machine import Machine, parse
from outcore.machine.link import Link
from outcore.planner.pipeline.loss_and_update import LossAndUpdate
from outcore.planner.pipeline.plan_job import links_of, weights_on
from outcore.program import Timeline
from outcore.run.engine.default_plan import _plan
from outcore.spatial import choose
from outcore.spatial.timeline import predict_timeline
from tests.cli.command import outcore_command

SMALL = """
import torch
from torch import nn

size = 32


def model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(12)))


def batch(size):
    return torch.randn(size, 16), torch.randn(size, 16)


def loss(output, target):
    return nn.functional.mse_loss(output, target)


def optimizer(parameters):
    return torch.optim.SGD(parameters, 0.1)
"""


def cpus(link: Link | None = None) -> Machine:
    """Two devices of one clock, on which small calls take what launching them takes."""
    gpus = parse("2xv100")
    one = replace(gpus.devices[0], kind="cpu", name="slow", dispatch_s=20e-6)
    fast = Link.symmetric(bandwidth_bytes_per_s=1e12, latency_s=1e-7)
    return replace(gpus, devices=(one, one), between_devices=link or fast)


def small_job(tmp_path: Path) -> outcore.Job:
    (tmp_path / "job.py").write_text(SMALL)
    return outcore.Job.load(str(tmp_path / "job.py"))


def test_many_small_calls_get_fewer_micro_batches(tmp_path: Path) -> None:
    job, machine = small_job(tmp_path), cpus()
    graph = job.capture()
    blind = outcore.plan(job, machine=machine, schedule="gpipe", costs=estimate(graph, machine))
    made = outcore.plan(job, machine=machine, schedule="gpipe")
    assert made.micro_batches < blind.micro_batches
    assert made.predicted is not None and blind.predicted is not None
    assert made.predicted.time_s > blind.predicted.time_s


def test_the_plan_of_a_graph_of_an_engine_and_of_training_know_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Costs] = []
    planned: Callable[..., Any] = choose.plan_stages

    def spied(graph: outcore.Graph, costs: Costs, *args: Any, **options: Any) -> Any:
        seen.append(costs)
        return planned(graph, costs, *args, **options)

    monkeypatch.setattr(choose, "plan_stages", spied)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    outcore.plan(outcore.capture(model, (torch.zeros(8, 16),)), machine=cpus())
    _plan(2, model, torch.zeros(8, 16))
    _plan(2, small_job(tmp_path), None)
    assert len(seen) == 3
    assert all(any(row.fixed_forward_s for row in costs.calls.values()) for costs in seen)


def test_what_the_command_prints_is_what_the_call_returns_and_what_the_timeline_shows(tmp_path: Path) -> None:
    job, machine = small_job(tmp_path), cpus()
    machine.save(tmp_path / "machine.json")
    words = ("plan", "job.py", "--on", "machine.json", "--schedule", "1f1b", "--json", "-o", "plan.json")
    done = outcore_command(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)["predicted"]["time_s"]
    made = outcore.plan(job, machine=machine, schedule="1f1b")
    assert made.predicted is not None and made.predicted.time_s == pytest.approx(printed)
    shown = outcore_command("simulate", "job.py", "plan.json", "--on", "machine.json", "--json", folder=tmp_path)
    assert Timeline.from_json(json.loads(shown.stdout)).step_s == pytest.approx(printed)


def test_a_loss_has_fixed_times_where_the_network_has(tmp_path: Path) -> None:
    job, machine = small_job(tmp_path), cpus()
    graph = job.capture()
    beside = LossAndUpdate.of(job, graph, estimate(graph, machine), machine)
    assert sum(row.fixed_forward_s for row in beside.loss) > 0
    with_it, alone = weights_on(machine, graph, None, beside), weights_on(machine, graph)
    last = list(graph.calls)[-1]
    assert with_it.calls[last].fixed_forward_s > alone.calls[last].fixed_forward_s > 0
    blind = weights_on(machine, graph, estimate(graph, machine), beside)
    assert blind.calls[last].fixed_forward_s == 0  # what is not known is not nothing


def test_a_message_takes_its_hosts_in_the_search_and_in_the_timeline(tmp_path: Path) -> None:
    slow = Link.symmetric(bandwidth_bytes_per_s=1e12, latency_s=1e-7, host_s=2e-3)
    job = small_job(tmp_path)
    free, busy = (outcore.plan(job, machine=cpus(link), schedule="gpipe") for link in (None, slow))
    assert free.predicted is not None and busy.predicted is not None
    assert busy.micro_batches <= free.micro_batches and busy.predicted.time_s > free.predicted.time_s + 4e-3
    graph = job.capture()
    weights = weights_on(cpus(slow), graph, None, LossAndUpdate.of(job, graph, estimate(graph, cpus()), cpus(slow)))
    shown = predict_timeline(busy, graph, weights, links_of(cpus(slow)))
    assert shown.step_s == pytest.approx(busy.predicted.time_s)


def test_measuring_is_for_this_machine_and_several_devices(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SMALL)
    done = outcore_command("plan", "job.py", "--on", "v100x2", "--measure", "-o", "plan.json", folder=tmp_path)
    assert done.returncode == 1 and "cannot be measured on" in done.stderr
    done = outcore_command("plan", "job.py", "--devices", "1", "--measure", "-o", "plan.json", folder=tmp_path)
    assert done.returncode == 2 and "several devices" in done.stderr
    assert not (tmp_path / "plan.json").exists()
    done = outcore_command(
        "plan", "job.py", "--devices", "2", "--measure", "--seconds", "0.3", "-o", "plan.json", folder=tmp_path
    )
    assert done.returncode == 0 and outcore.Plan.load(tmp_path / "plan.json").ranks == 2
