"""Ranks that share an image, in real processes: gradients, losses, weights and buffers of plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.errors import PlanError
from outcore.models import UNet
from outcore.run import Engine
from tests.run.networks import CASES
from tests.run.pool import Pool, RankError
from tests.run.test_gradients import compare
from tests.run.training import batches_of, make_plan, momentum, plain, train

SPLIT: dict[str, Any] = {"spatial": {"grid": [1, 2]}, "exactness": "reassociated"}


def _run(ranks: Pool, case: str, plan: dict[str, Any], pieces: int = 1, steps: int = 3, size: int = 8) -> None:
    made = make_plan(case, **plan)
    compare(ranks.run(train, made.ranks, case, plan, steps, size), plain(case, pieces, steps, size))


@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_two_ranks_share_an_image(ranks: Pool, steps: int) -> None:
    _run(ranks, "unet-bn", {"stages": 1, **SPLIT}, steps=steps)


def test_four_ranks_share_an_image_of_unequal_parts(ranks: Pool) -> None:
    spatial = {"grid": [2, 2], "cuts": [[0.3], [0.6]]}
    plan = {"stages": 1, "spatial": spatial, "exactness": "reassociated", "micro_batches": 2}
    _run(ranks, "resnet", plan, pieces=2, steps=2, size=4)


def test_later_stages_run_on_a_rank_of_the_grid_or_on_one_more(ranks: Pool) -> None:
    _run(ranks, "resnet", {"stages": 2, "placement": (0, 0), **SPLIT}, pieces=1, steps=2)
    _run(ranks, "unet-bn", {"stages": 2, "micro_batches": 2, **SPLIT}, pieces=2, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["unet", "densenet", "inception", "missing-skips", "indices", "chain"])
def test_every_network_on_a_grid(ranks: Pool, case: str) -> None:
    for grid in ([1, 2], [2, 1], [2, 2], [1, 3]):
        _run(ranks, case, {"stages": 1, "spatial": {"grid": grid}, "exactness": "reassociated"})


@pytest.mark.slow
def test_replicas_of_a_grid_have_one_set_of_statistics(ranks: Pool) -> None:
    plan = {"stages": 1, "replicas": 2, "micro_batches": 2, **SPLIT}
    _run(ranks, "unet-bn", plan, pieces=4, size=16)


def _compared() -> float:
    made = make_plan("unet-bn", stages=2, **SPLIT)
    with Engine(CASES["unet-bn"].job, made, optimizer=momentum) as engine:
        engine.step(*batches_of("unet-bn", 1, 4)[0])
        return engine.comparison().ratio


@pytest.mark.slow
def test_a_step_on_a_grid_is_compared_with_its_schedule(ranks: Pool) -> None:
    assert all(ratio > 0.5 for ratio in ranks.run(_compared, 3))


@pytest.mark.slow
def test_a_grid_before_a_pipeline_in_two_replicas(ranks: Pool) -> None:
    """Six ranks: twice two that share the image and one behind them; borders go ahead."""
    spatial = {"grid": [1, 2], "early": ["enc1#0:out"]}
    plan = {"stages": 2, "replicas": 2, "micro_batches": 2, "spatial": spatial, "exactness": "reassociated"}
    _run(ranks, "unet-bn", plan, pieces=4, size=16)


def test_ranks_stream_their_parts_in_tiles(ranks: Pool) -> None:
    plan = {"stages": 1, "spatial": {"grid": [1, 2], "tile": 8}, "exactness": "reassociated"}
    _run(ranks, "unet-bn", plan, steps=2, size=2)


class ChannelDropout(nn.Module):
    """Random numbers that all ranks can draw, before the place where the image is whole again, and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)
        self.channels, self.elements = nn.Dropout2d(0.4), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.elements(self.two(self.channels(self.one(x)).relu()))


def _train_with_dropout(spatial: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(1)
    model, x = ChannelDropout().double(), torch.randn(4, 2, 9, 7, dtype=torch.float64)
    fingerprint = outcore.capture(model, x).fingerprint
    made = outcore.Plan(fingerprint, (("",),), spatial=spatial, exactness="reassociated")
    with Engine(model, made, loss=F.mse_loss, optimizer=momentum, example=x, seed=5) as engine:
        return [engine.step(x, x * 2) for _ in range(4)]


def test_random_masks_are_those_of_one_rank(ranks: Pool) -> None:
    alone = _train_with_dropout(None)
    for losses in ranks.run(_train_with_dropout, 2, SPLIT["spatial"]):
        assert losses == pytest.approx(alone, rel=1e-10)


def _source(x: torch.Tensor, read: list[int]) -> outcore.stream.FunctionSource:
    """A tensor as a source, which notes how much is read."""

    def crop(region: Any) -> torch.Tensor:
        found = x[tuple(slice(a, b) for a, b in region)].clone()
        read.append(found.numel())
        return found

    return outcore.stream.FunctionSource(tuple(x.shape), crop, torch.float64)


def _small_network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
    return net.double(), torch.randn(2, 2, 24, 20, dtype=torch.float64)


def _train_from_source(spatial: dict[str, Any] | None) -> tuple[list[float], float]:
    """Losses, and the part of the image that was read at once at most."""
    model, x = _small_network()
    read: list[int] = []
    image = _source(x, read)
    fingerprint = outcore.capture(model, x).fingerprint
    made = outcore.Plan(fingerprint, (("",),), spatial=spatial, exactness="reassociated", batches=1, micro_batches=1)
    with Engine(model, made, loss=F.mse_loss, optimizer=momentum, example=x, seed=5) as engine:
        losses = [engine.step(image, x * 2) for _ in range(3)] + [engine.evaluate(image, x)]
        losses.append(engine.step(x, x * 2))
    return losses, max(read) / x.numel()


def test_a_rank_reads_its_part_of_a_source_alone(ranks: Pool) -> None:
    alone, all_of_it = _train_from_source(None)
    assert all_of_it == 1.0
    for losses, part in ranks.run(_train_from_source, 2, SPLIT["spatial"]):
        assert losses == pytest.approx(alone, rel=1e-10) and part == pytest.approx(11 / 20)


def _train_on_pixels(spatial: dict[str, Any] | None, reduction: str, pieces: int) -> tuple[Any, ...]:
    """Losses, weights, output, and the part of the target that was read of every micro-batch."""
    model, x = _small_network()
    read: list[int] = []
    target = _source(x * 2, read)
    loss: Any = F.mse_loss  # known to be a mean over elements
    if reduction == "sum":
        loss = outcore.stream.PixelLoss(lambda a, b: F.mse_loss(a, b, reduction="sum") / x.numel(), "sum")
    fingerprint = outcore.capture(model, x).fingerprint
    made = outcore.Plan(fingerprint, (("",),), micro_batches=pieces, spatial=spatial, exactness="reassociated")
    with Engine(model, made, loss=loss, optimizer=momentum, example=x[: 2 // pieces], reduction=reduction) as engine:
        losses = [engine.step(x, target) for _ in range(2)]
        part = sum(read) / x.numel() / 2
        losses.append(engine.evaluate(x, target))
        weights = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        return losses, weights, engine.predict(x), part


@pytest.mark.parametrize(
    ("more", "reduction", "pieces"),
    [({}, "sum", 2), ({"tile": 7}, "mean", 1), pytest.param({"tile": 7}, "sum", 2, marks=pytest.mark.slow)],
)
def test_a_loss_over_pixels_is_taken_in_parts(ranks: Pool, more: dict[str, Any], reduction: str, pieces: int) -> None:
    """Each rank reads its part of the target, and no other."""
    losses, weights, output, all_of_it = _train_on_pixels(None, reduction, pieces)
    assert all_of_it == pytest.approx(1.0)
    spatial = {**SPLIT["spatial"], "loss": "parts", **more}
    found = ranks.run(_train_on_pixels, 2, spatial, reduction, pieces)
    assert sum(part for *_, part in found) == pytest.approx(1.0) and max(part for *_, part in found) < 0.75
    for ours, state, *_ in found:
        assert ours == pytest.approx(losses, rel=1e-10)
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[0][2], output, rtol=1e-9, atol=1e-9)


def test_a_loss_in_parts_needs_a_loss_over_pixels() -> None:
    model, x = _small_network()
    plan = outcore.Plan(outcore.capture(model, x).fingerprint, (("",),), spatial={"grid": [1, 1], "tile": 9})
    with Engine(model, plan, loss=F.mse_loss, optimizer=momentum, example=x) as engine:
        found = engine.step(x, x * 2)  # one rank, in tiles
    assert found == pytest.approx(_train_on_pixels(None, "mean", 1)[0][0], rel=1e-10)
    in_parts = outcore.Plan(plan.graph, (("",),), spatial={"grid": [1, 1], "tile": 9, "loss": "parts"})
    with pytest.raises(PlanError, match="PixelLoss"):
        Engine(model, in_parts, loss=F.cross_entropy, optimizer=momentum, example=x)


def _save_or_go_on(path: str, plan: dict[str, Any], save: bool) -> list[float]:
    engine = Engine(CASES["unet-bn"].job, make_plan("unet-bn", **plan), optimizer=momentum)
    batches = batches_of("unet-bn", 4, 8)
    if not save:
        engine.load(path)
    losses = [engine.step(*batch) for batch in (batches[:2] if save else batches[2:])]
    if save:
        engine.save(path)
    engine.close()
    return losses


def test_a_checkpoint_of_a_grid_goes_on_under_another_plan(ranks: Pool, tmp_path: Path) -> None:
    wanted = plain("unet-bn", 1, 4)["losses"]
    grid, stages = {"stages": 1, **SPLIT}, {"stages": 2}
    assert ranks.run(_save_or_go_on, 2, str(tmp_path), grid, True)[0] == pytest.approx(wanted[:2], rel=1e-9)
    for plan in (grid, stages):
        assert ranks.run(_save_or_go_on, 2, str(tmp_path), plan, False)[0] == pytest.approx(wanted[2:], rel=1e-9)


class FailsOnOneRank(nn.Module):
    """Ends one rank of the grid in the middle of a backward, while another waits for its halos."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def _fail() -> None:
    model, x = FailsOnOneRank(), torch.randn(2, 2, 9, 8)
    made = outcore.Plan(outcore.capture(model, x).fingerprint, (("",),), **SPLIT)
    with Engine(model, made, loss=F.mse_loss, optimizer=momentum, example=x, grace_s=5.0) as engine:
        if engine.rank == 1:
            engine.model.one.weight.register_hook(_refuse)
        engine.step(x, x)


def _refuse(gradient: torch.Tensor) -> None:
    raise ArithmeticError("this gradient is not wanted")


def test_a_rank_that_fails_is_named_to_the_others(ranks: Pool) -> None:
    with pytest.raises(RankError) as found:
        ranks.run(_fail, 2)
    text = str(found.value)
    assert "this gradient is not wanted" in text.split("rank 1:")[0], text  # rank 0 says what rank 1 met


def test_what_cannot_be_split_is_refused() -> None:
    graph = outcore.capture(nn.Sequential(nn.Flatten(), nn.Linear(8, 2)), torch.randn(1, 2, 2, 2)).fingerprint
    with pytest.raises(PlanError, match="cannot have the gems schedule"):
        outcore.Plan(graph, (("",),), schedule="gems", spatial={"grid": [2, 2]})
    with pytest.raises(PlanError, match="grid"):
        outcore.Plan(graph, (("",),), spatial={"grid": []})
    plan = outcore.Plan(graph, (("",),), spatial={"grid": [2, 2]})
    assert plan.ranks == 4 and outcore.Plan.from_json(plan.to_json()) == plan


def _peaks(plan: dict[str, Any]) -> tuple[int, ...]:
    job = _large()
    with Engine(job, outcore.Plan.from_json(plan), optimizer=momentum) as engine:
        engine.step(*job.batch(1))
        engine.count_memory()
        engine.step(*job.batch(1))
        return engine.timeline().peak_bytes


def _large() -> outcore.Job:
    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 3, 160, 128), torch.randn(size, 2, 160, 128)

    return outcore.Job(model=lambda: UNet(3, 2, width=8, depth=2), batch=batch, loss=F.mse_loss, size=1)


@pytest.mark.slow
def test_the_peak_of_every_rank_is_the_predicted_one(ranks: Pool) -> None:
    plan = outcore.spatial.plan_grid(_large(), (1, 2), machine="v100x2")
    assert plan.predicted is not None
    weights = sum(p.numel() * 4 for p in _large().build().parameters())
    for measured in ranks.run(_peaks, 2, plan.to_json()):
        for peak, predicted in zip(measured, plan.predicted.peak_bytes, strict=True):
            assert 0.9 * predicted < peak < 1.05 * predicted + 2 * weights  # momentum, and a row of gradients
