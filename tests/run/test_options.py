"""Clipping, mixed precision, accumulation, frozen and grouped parameters, uneven and changing batches, batch norm."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from outcore.program import Backward, Forward
from outcore.program.timeline import COMPUTE
from outcore.run import LossScale
from tests.run.networks import CASES
from tests.run.pool import Pool
from tests.run.training import batches_of, difference, momentum, plain, share
from tests.run.varying import (
    ALONE,
    GEMS,
    PIPE,
    decay,
    hooked,
    images_of_sides,
    module_in_place,
    norms_of_batches,
    refused,
    run,
    synthesised,
    timelines,
)


def plain_loop(case: str, sizes: tuple[int, ...], pieces: int, after: Any, groups: Any = None, freeze: str = "") -> Any:
    """Plain PyTorch over micro-batches; `after(model)` acts on gradients before the step."""
    job = CASES[case].job
    torch.manual_seed(0)
    model = job.build().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not freeze or not name.startswith(freeze))
    rows = [{"params": [p], **(groups(n, p) if groups else {})} for n, p in model.named_parameters()]
    optimizer = momentum(rows)
    for i, size in enumerate(sizes):
        torch.manual_seed(i)
        inputs, targets = job.batch(size)
        optimizer.zero_grad()
        count = min(pieces, size)
        for piece in range(count):
            x, t = share(inputs, piece, count), share(targets, piece, count)
            (job.loss(model(x), t) * (x.shape[0] / size)).backward()
        after(model)
        optimizer.step()
    return {n: t.clone() for n, t in model.state_dict().items()}


def test_clipping_is_over_all_stages(ranks: Pool) -> None:
    norms: list[float] = []

    def clip(model: torch.nn.Module) -> None:
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))

    oracle = plain_loop("unet", (8, 8), 4, clip)
    alone = run("unet", ALONE, clip_norm=0.05)
    assert alone["norms"] == norms
    assert all(torch.equal(t, oracle[n]) for n, t in alone["weights"].items())
    for result in ranks.run(run, 2, "unet", PIPE, clip_norm=0.05):
        assert result["norms"] == pytest.approx(norms, rel=1e-12)
        assert difference(result["weights"], oracle) < 1e-10


def test_groups_and_frozen_parameters(ranks: Pool) -> None:
    oracle = plain_loop("unet", (8, 8), 4, lambda _: None, decay, "enc")
    for result in ranks.run(run, 2, "unet", PIPE, freeze="enc", groups=decay):
        assert difference(result["weights"], oracle) < 1e-10
    begun = {n: t for n, t in run("unet", ALONE, (), freeze="enc")["weights"].items() if n.startswith("enc")}
    assert all(torch.equal(t, oracle[n]) for n, t in begun.items())


def test_accumulated_steps_are_one_update(ranks: Pool) -> None:
    job = CASES["unet"].job
    torch.manual_seed(0)
    model = job.build()
    optimizer = momentum(model.parameters())
    for i in range(2):
        torch.manual_seed(i)
        inputs, targets = job.batch(8)
        for piece in range(2):
            (job.loss(model(share(inputs, piece, 2)), share(targets, piece, 2)) / 4).backward()
    optimizer.step()
    for result in ranks.run(run, 2, "unet", GEMS, accumulate=2):
        assert difference(result["weights"], dict(model.state_dict())) < 1e-10


def test_uneven_and_small_batches_count_every_sample(ranks: Pool) -> None:
    sizes = (7, 3, 1, 8)
    gems = {"stages": 2, "schedule": "gems", "batches": 4}
    oracle = plain_loop("unet", sizes, 4, lambda _: None)
    for plan in (PIPE, gems):
        for result in ranks.run(run, 2, "unet", plan, sizes):
            assert difference(result["weights"], oracle) < 1e-10
            assert result["samples"] == sum(sizes)
    hybrid = {"stages": 2, "schedule": "gpipe", "micro_batches": 2, "replicas": 2}
    whole = plain_loop("unet", (7, 8), 4, lambda _: None)
    for result in ranks.run(run, 4, "unet", hybrid, (7, 8)):
        assert difference(result["weights"], whole) < 1e-10


def test_shapes_change_from_step_to_step_and_middle_ranks_need_no_data(ranks: Pool) -> None:
    sides = (6, 7, 6, 8)
    alone = images_of_sides(ALONE, sides)
    for losses in ranks.run(images_of_sides, 3, {"stages": 3, "micro_batches": 4}, sides):
        assert losses == pytest.approx(alone, rel=1e-12)


def test_mixed_precision_with_one_loss_scale(ranks: Pool) -> None:
    exact = run("unet-float", ALONE)
    for dtype in (torch.bfloat16, torch.float16):
        alone = run("unet-float", ALONE, autocast=dtype)
        assert 0 < difference(alone["weights"], exact["weights"]) < 0.01
        for result in ranks.run(run, 2, "unet-float", PIPE, autocast=dtype):
            assert result["losses"] == alone["losses"] and result["scales"] == alone["scales"]
            assert all(torch.equal(t, alone["weights"][n]) for n, t in result["weights"].items())
    assert alone["scales"] == [65536.0, 65536.0]


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Pool) -> None:
    begun = run("unet-float", ALONE, ())["weights"]
    for plan, count in ((ALONE, 1), (PIPE, 2)):
        options = {"autocast": torch.float16, "loss_scale": LossScale(2.0**130, interval=2)}
        for result in ranks.run(run, count, "unet-float", plan, (8,), **options):
            assert result["skipped"] == 1 and result["scales"] == [2.0**129]
            assert all(torch.equal(t, begun[n]) for n, t in result["weights"].items())


def test_the_loss_scale_moves_as_torchs() -> None:
    ours, theirs = LossScale(4.0, interval=2), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    optimizer = torch.optim.SGD([weight := torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for gradient in (1.0, float("inf"), 1.0, 1.0, 1.0):
        weight.grad = torch.full((1,), gradient)
        theirs.scale(torch.ones(1))
        theirs.unscale_(optimizer)
        theirs.update()
        ours.update(gradient == float("inf"))
        assert ours.scale == theirs.get_scale()


@pytest.mark.parametrize("inverted", [False, True])
def test_synthesised_orders_run(ranks: Pool, inverted: bool) -> None:
    oracle = plain("unet", 4)
    for result in ranks.run(synthesised, 2, inverted):
        assert result["losses"] == pytest.approx(oracle["losses"], rel=1e-10)
        assert difference(result["weights"], oracle["weights"]) < 1e-9


def _deferred_oracle() -> dict[str, torch.Tensor]:
    """Plain micro-batches; running statistics move once per step, by what the layers saw in all of them."""
    job = CASES["resnet"].job
    torch.manual_seed(0)
    model = job.build().train()
    norms = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.BatchNorm2d)}
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in norms.items():
        module.register_forward_pre_hook(lambda _, args, name=name: seen.setdefault(name, []).append(args[0].detach()))
    kept = {n: (m.running_mean.clone(), m.running_var.clone()) for n, m in norms.items()}
    optimizer = momentum(model.parameters())
    for inputs, targets in batches_of("resnet", 2, 8):
        optimizer.zero_grad()
        seen.clear()
        for i in range(4):
            (job.loss(model(share(inputs, i, 4)), share(targets, i, 4)) / 4).backward()
        optimizer.step()
        for name, module in norms.items():
            whole = torch.cat(seen[name])
            mean, var = kept[name]
            mean = 0.9 * mean + 0.1 * whole.mean((0, 2, 3))
            var = 0.9 * var + 0.1 * whole.var((0, 2, 3))
            kept[name] = (mean, var)
            module.running_mean.copy_(mean)
            module.running_var.copy_(var)
    return {n: t.clone() for n, t in model.state_dict().items() if "tracked" not in n}


def test_deferred_statistics_move_once_by_the_whole_batch(ranks: Pool) -> None:
    oracle = _deferred_oracle()
    for plan, count in (
        (ALONE, 1),
        (PIPE, 2),
        ({"stages": 2, "schedule": "gems", "batches": 4}, 2),
        ({"stages": 2, "schedule": "gpipe", "micro_batches": 2, "replicas": 2}, 4),
    ):
        for state in ranks.run(norms_of_batches, count, "deferred", plan):
            assert all(int(t) == 2 for n, t in state.items() if "tracked" in n)
            assert difference({n: t for n, t in state.items() if "tracked" not in n}, oracle) < 1e-10


def test_synchronised_statistics_are_those_of_the_whole_batch(ranks: Pool) -> None:
    oracle = plain("resnet", 1, steps=2)["weights"]
    plan = {"stages": 2, "replicas": 2}
    for state in ranks.run(norms_of_batches, 4, "synchronised", plan):
        assert all(torch.equal(t, oracle[n]) for n, t in state.items() if "tracked" in n)
        assert difference({n: t for n, t in state.items() if "tracked" not in n}, oracle) < 1e-10


@pytest.mark.parametrize("plan", [PIPE, GEMS])
def test_a_step_leaves_its_timeline_and_nothing_else(ranks: Pool, plan: dict[str, Any]) -> None:
    for timeline, text, grown in ranks.run(timelines, 2, plan):
        computed = [e for e in timeline.events if e.stream == COMPUTE]
        pieces = plan.get("micro_batches", 1) * plan.get("batches", 1)
        for kind in (Forward, Backward):
            names = [e for e in computed if e.kind == kind.__name__.lower()]
            assert {(e.stage, e.micro_batch) for e in names} == {(s, m) for s in range(2) for m in range(pieces)}
            assert len(names) == 2 * pieces
        sent = [e for e in timeline.events if e.stream == "send"]
        received = [e for e in timeline.events if e.stream == "receive"]
        assert len(sent) == len(received) and sum(e.bytes for e in sent) == sum(e.bytes for e in received) > 0
        assert all(0 <= e.start_s <= e.end_s for e in timeline.events)
        for rank in range(2):
            mine = [e for e in computed if e.rank == rank]
            assert all(a.end_s <= b.start_s for a, b in pairwise(mine))
        assert all(peak > 0 for peak in timeline.peak_bytes)
        assert "measured" in text and "predicted" in text
        assert grown <= 0


def test_every_forward_goes_through_one_place() -> None:
    assert len(hooked()) == 8


def test_a_module_is_trained_in_place_and_keeps_its_modes() -> None:
    assert module_in_place() == (True, True)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("ranks", "PlanError: the plan needs 3 ranks"),
        ("network", "PlanError: the plan was made for graph"),
        ("different plans", "another plan than rank"),
        ("different code", "another network than rank"),
        ("different shapes", "were given different batches (inputs: float64 8x2x6x6 and float64 12x2x6x6)"),
        ("shapes known before", "were given different batches (inputs: float64 8x2x6x6 and float64 12x2x6x6)"),
        ("different dtypes", "were given different batches (inputs: float64 8x2x6x6 and float32 8x2x6x6)"),
        ("different structure", "were given different batches (inputs: float64 8x2x6x6 and a tuple)"),
        ("no data", "no rank of replica 0 was given inputs"),
        ("synchronised", "PlanError: synchronised batch normalisation needs"),
        ("no gpu", 'EngineError: device "cuda" was asked for'),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(ranks: Pool, what: str, told: str) -> None:
    if what == "no gpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for message in ranks.run(refused, 2, what):
        assert told in message


def test_the_loss_may_be_a_sum() -> None:
    job = CASES["unet"].job

    def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target, reduction="sum")

    got = run("unet", ALONE, (8,), loss=total, reduction="sum")
    torch.manual_seed(0)
    model = job.build()
    torch.manual_seed(0)
    inputs, targets = job.batch(8)
    assert got["losses"][0] == pytest.approx(total(model(inputs), targets).item(), rel=1e-12)
