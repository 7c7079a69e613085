"""Communication of data parallel training: buckets as torch makes them, and times that can be computed by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import outcore
from outcore.errors import WhatIfError
from outcore.machine import Device, parse
from outcore.machine.link import Link
from outcore.whatif.data_parallel import buckets_of, buffer_bytes, data_parallel, gradient_tasks, sharded, units_of
from outcore.whatif.links import ClusterLink, parse_link
from outcore.whatif.recording import record_setup
from outcore.whatif.scaling import scale_out
from outcore.whatif.setup import TrainingSetup
from outcore.whatif.techniques import parse_techniques
from tests.whatif.jobs import images

V100 = parse("v100").devices[0]
CPU = Device("a processor", "cpu", 8 << 30, 20e9, {"fp32": 1e11}, dispatch_s=3e-6)
FAST = ClusterLink("fast", Link.symmetric(bandwidth_bytes_per_s=1e15, latency_s=1e-12), share=1.0, trees=False)
SLOW = ClusterLink("slow", Link.symmetric(bandwidth_bytes_per_s=1e6, latency_s=1e-3), share=1.0, trees=False)


@pytest.mark.parametrize("seed", range(40))
def test_buckets_are_those_of_torch(seed: int) -> None:
    source = random.Random(seed)
    tensors = [torch.empty(source.randint(1, 60)) for _ in range(source.randint(1, 25))]
    limits = [source.randint(1, 150), source.randint(1, 400)]
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, limits)  # type: ignore[attr-defined]
    names = [str(i) for i in range(len(tensors))]
    found = buckets_of(
        {n: n for n in names},
        {n: 4 * t.numel() for n, t in zip(names, tensors, strict=True)},
        first_bytes=limits[0],
        bucket_bytes=limits[1],
    )
    assert [[int(n) for n in b.parameters] for b in found] == expected


def test_gradients_come_in_the_order_of_backward() -> None:
    job = images()
    found = gradient_tasks(record_setup(TrainingSetup(job), V100))
    model, order = job.build(), list[str]()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    inputs, _, target = job.example()
    assert job.loss is not None
    job.loss(model(*inputs), target).backward()
    layers = [name.split(".")[0] for name in order]
    assert [name.split(".")[0] for name in found] == layers and set(found) == set(order)


@pytest.mark.parametrize("ranks", [2, 3, 8, 1024])
def test_a_slow_link_sets_the_step(ranks: int) -> None:
    found = record_setup(TrainingSetup(images()), V100)
    step = data_parallel(found.step, found, ranks, SLOW).simulate()
    sizes = [b.bytes for b in buckets_of(gradient_tasks(found), found.profile.costs.parameters)]
    wire_s = sum(2 * (ranks - 1) * (1e-3 + size / ranks / 1e6) for size in sizes)
    wire_s += (ranks - 1) * (1e-3 + buffer_bytes(found) / ranks / 1e6)
    assert step.busy_s("link") == pytest.approx(wire_s)
    assert wire_s < step.step_s < wire_s + found.step.simulate().step_s + 1e-3


@pytest.mark.parametrize("device", [V100, CPU], ids=["gpu", "cpu"])
def test_statistics_of_norms_are_sent_before_forward(device: Device) -> None:
    """The step begins a message later, and nothing hides it; without buffers there is none."""
    plain, normed = (record_setup(TrainingSetup(small(norm)), device) for norm in (False, True))
    model = small(norm=True).build()
    assert buffer_bytes(plain) == 0
    assert buffer_bytes(normed) == sum(buffer.nbytes for buffer in model.buffers()) > 0
    late = ClusterLink("late", Link.symmetric(bandwidth_bytes_per_s=1e15, latency_s=3.0), share=1.0, trees=False)
    found = data_parallel(normed.step, normed, 2, late)
    sent = found.tasks["broadcast buffers"]
    assert sent.time_s == pytest.approx(3.0)
    assert "broadcast buffers" not in data_parallel(plain.step, plain, 2, late).tasks
    reduced = sum(1 for name in found.tasks if name.startswith("all-reduce"))
    assert found.simulate().step_s == pytest.approx(3.0 + reduced * 2 * 3.0, rel=0.05)


def small(norm: bool) -> outcore.Job:
    """A network with a batch norm, or without."""

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3),
            torch.nn.BatchNorm2d(8) if norm else torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * 36, 4),
        )

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(size, 3, 8, 8), torch.zeros(size, dtype=torch.long)

    return outcore.Job(
        model=model,
        batch=batch,
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        size=2,
    )


def test_a_free_link_costs_nothing_but_copies() -> None:
    found = record_setup(TrainingSetup(images()), V100)
    free = ClusterLink("free", Link.symmetric(bandwidth_bytes_per_s=1e18), share=1.0)
    alone = found.step.simulate().step_s
    assert data_parallel(found.step, found, 4, free).simulate().step_s == pytest.approx(alone, rel=0.02)
    for weave in (data_parallel, sharded):
        assert weave(found.step, found, 1, free) == found.step


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_on_a_cpu_an_all_reduce_is_work_of_the_cores_that_compute(ranks: int) -> None:
    found = record_setup(TrainingSetup(images()), CPU)
    alone = found.step.simulate()
    quick = ClusterLink("quick", Link.symmetric(bandwidth_bytes_per_s=1e18), share=1.0)
    step = data_parallel(found.step, found, ranks, quick).simulate()
    weights = sum(found.profile.costs.parameters.values())
    copies_s = 2 * weights * 2 / CPU.bandwidth_bytes_per_s
    work_s = quick.core_s(weights, ranks, CPU)
    assert work_s == pytest.approx(4 * (ranks - 1) / ranks * weights / (0.1 * CPU.bandwidth_bytes_per_s))
    assert step.step_s == pytest.approx(alone.step_s + copies_s + work_s)  # however fast the link, it is not hidden
    assert quick.core_s(weights, ranks, V100) == 0.0


def test_on_a_cpu_the_hooks_of_sharding_are_counted() -> None:
    found = record_setup(TrainingSetup(images()), CPU)
    units = units_of(found)
    assert [unit.parameters for unit in units] == [2, 2, 2, 2, 2]
    free = ClusterLink("free", Link.symmetric(bandwidth_bytes_per_s=1e18), share=1.0)
    optimizer_s = sum(t.time_s for t in found.step.tasks.values() if t.phase == "optimizer" and t.kind != "launch")
    copies_s = 3 * sum(unit.bytes for unit in units) * 2 / CPU.bandwidth_bytes_per_s
    more_s = sharded(found.step, found, 2, free).simulate().step_s - found.step.simulate().step_s
    assert more_s == pytest.approx(copies_s - optimizer_s / 2 + 5 * (145 + 2 * 20) * CPU.dispatch_s)


def test_where_the_host_sets_the_pace_sharding_is_slower_than_data_parallel() -> None:
    found = record_setup(TrainingSetup(images()), V100)
    free = ClusterLink("free", Link.symmetric(bandwidth_bytes_per_s=1e18), share=1.0)
    alone, step = found.step.simulate(), sharded(found.step, found, 2, free).simulate()
    assert alone.bound_by == "host"
    more_s = sum(145 + 20 * unit.parameters for unit in units_of(found)) * V100.dispatch_s
    assert step.busy_s("host") == pytest.approx(alone.busy_s("host") + more_s)
    assert step.step_s > data_parallel(found.step, found, 2, free).simulate().step_s
    graphed = parse_techniques("graphs")[0].tasks(found.step, found)
    assert sharded(graphed, found, 2, free).simulate().busy_s("host") == graphed.simulate().busy_s("host")


def test_sharding_gathers_twice_and_scatters_once() -> None:
    found = record_setup(TrainingSetup(images()), V100)
    step = sharded(found.step, found, 4, SLOW)
    moved = {
        kind: sum(t.bytes for t in step.tasks.values() if t.kind == kind) for kind in ("all-gather", "reduce-scatter")
    }
    weights = sum(found.profile.costs.parameters.values())
    assert sum(u.bytes for u in units_of(found)) == weights
    assert moved == {"all-gather": 2 * weights, "reduce-scatter": weights}


def test_links_are_found_by_name_or_by_figures() -> None:
    assert parse_link("25gbe").link.away_bytes_per_s == 3.125e9
    assert parse_link("100mbit+20ms").link == Link.symmetric(bandwidth_bytes_per_s=12.5e6, latency_s=0.02)
    names = [parse_link(text).name for text in ("25gb", "25Gbit", "100mbit/s+20ms")]
    assert names == ["25 GB/s", "25 Gbit/s", "100 Mbit/s + 20 ms"]  # how a figure was understood
    assert parse_link("nvlink", V100).link.away_bytes_per_s == 50e9
    with pytest.raises(WhatIfError, match="did you mean 25gbe"):
        parse_link("25gb3")
    with pytest.raises(WhatIfError, match="no NVLink"):
        parse_link("nvlink", parse("l4").devices[0])


def test_a_verdict_follows_the_link() -> None:
    fast = scale_out(images(64), [1, 2, 4], parse_link("ib-ndr"), device=V100, strategies=("data_parallel",))
    slow = scale_out(images(64), [1, 2, 4], parse_link("1mbit"), device=V100, strategies=("data_parallel",))
    assert all(fast.helps().values()) and not any(slow.helps().values())
    assert "no longer hidden" in slow.verdict() and "slower than 1" in slow.verdict()
    strong = scale_out(
        images(64), [1, 4], parse_link("ib-ndr"), device=V100, mode="strong", strategies=("data_parallel",)
    )
    assert [p.batch for p in strong.points] == [64, 64]
    # The largest part of the model is its second convolution: 16 x 8 x 9 weights and 16 biases.
    assert fast.largest_block == ("3", 4 * (16 * 8 * 9 + 16)) and fast.weight_bytes > fast.largest_block[1]


@pytest.mark.parametrize(("gpus", "how"), [([0], "data_parallel"), ([1], "pipelined"), ([128], "data_parallel")])
def test_what_makes_no_sense_is_refused(gpus: list[int], how: str) -> None:
    with pytest.raises(WhatIfError):
        scale_out(images(64), gpus, SLOW, device=V100, strategies=(how,), mode="strong")


def test_a_pipeline_updates_its_weights_too() -> None:
    job = images(2)
    step_s = {}
    for optimizer in (None, torch.optim.Adam):
        asked = scale_out(replace(job, optimizer=optimizer), [2], FAST, device=V100, strategies=("gpipe",))
        (step_s[optimizer],) = [p.step_s for p in asked.of("gpipe")]
    update = record_setup(TrainingSetup(job), V100).optimizer
    assert update is not None
    # The larger stage has between half of the weights and all of them; where the network is cut may change with it.
    whole_s = max(update.median_s, update.dispatch_s)
    assert 0.4 * whole_s <= step_s[torch.optim.Adam] - step_s[None] <= 1.5 * whole_s


def test_a_thousand_ranks_and_a_pipeline() -> None:
    found = scale_out(images(8), [1, 2, 1024], SLOW, device=V100, strategies=("data_parallel", "gpipe"))
    assert found.best(1024).gpus == 1024 and len(found.of("gpipe")) + len(found.refused) == 3
