"""Checkpoints: bitwise resuming, other numbers of ranks, plain PyTorch, torn files, full disks, kills, signals."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outcore.errors import CheckpointError
from outcore.run.checkpoint.restore import read_weights
from tests.foreign.sample import one_in, sometimes
from tests.run.networks import CASES
from tests.run.pool import Pool
from tests.run.resuming import BY_STAGES, go, save_twice, signalled, survive
from tests.run.training import difference


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())


def test_a_resumed_run_continues_bitwise(ranks: Pool, tmp_path: Path) -> None:
    plan = {"stages": 2, "schedule": "gems", "batches": 4}
    whole = ranks.run(go, 2, "transformer", plan, 0, 4)
    for wait in (True, False):
        path = str(tmp_path / str(wait))
        first = ranks.run(go, 2, "transformer", plan, 0, 2, path, save=True, wait=wait)
        second = ranks.run(go, 2, "transformer", plan, 2, 4, path, load=True)
        assert first[0]["losses"] + second[0]["losses"] == whole[0]["losses"]
        assert all(equal(rank["weights"], whole[0]["weights"]) for rank in second)
        assert second[0]["extra"] == {"epoch": 3} and second[0]["rate"] == whole[0]["rate"]


def test_the_users_generators_continue(tmp_path: Path) -> None:
    whole = go("unet", BY_STAGES[1], 0, 2)
    torch.manual_seed(0)
    random.seed(3)
    first = go("unet", BY_STAGES[1], 0, 1, str(tmp_path), save=True)
    expected = first["drawn"]
    torch.manual_seed(99)
    random.seed(99)
    resumed = go("unet", BY_STAGES[1], 1, 1, str(tmp_path), load=True)
    assert resumed["drawn"] == expected
    assert whole["losses"][0] == first["losses"][0]


@pytest.mark.parametrize(("saved_on", "resumed_on"), one_in(2, [(2, 1), (1, 2), (2, 4), (4, 2)]))
def test_another_number_of_ranks_resumes(ranks: Pool, tmp_path: Path, saved_on: int, resumed_on: int) -> None:
    oracle = go("resnet", BY_STAGES[1], 0, 4)
    ranks.run(go, saved_on, "resnet", BY_STAGES[saved_on], 0, 2, str(tmp_path), save=True)
    resumed = ranks.run(go, resumed_on, "resnet", BY_STAGES[resumed_on], 2, 4, str(tmp_path), load=True)
    for result in resumed:
        assert result["losses"] == pytest.approx(oracle["losses"][2:], rel=1e-9)
        assert difference(result["weights"], oracle["weights"]) < 1e-8


def test_weights_load_in_plain_pytorch(ranks: Pool, tmp_path: Path) -> None:
    saved = ranks.run(go, 2, "transformer", BY_STAGES[2], 0, 1, str(tmp_path), save=True)[0]
    directory = tmp_path / (tmp_path / "latest").read_text().strip()
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    state: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        state |= load_file(directory / file)
    model = CASES["transformer"].job.build()
    model.load_state_dict(state)
    assert equal(dict(model.state_dict()), saved["weights"])
    assert equal(read_weights(tmp_path), saved["weights"])
    assert {f.suffix or f.name for f in directory.rglob("*")} == {".json", ".safetensors", "SHA256SUMS"}


@pytest.mark.parametrize(("saved_on", "resumed_on"), [(1, 2), (2, 1)])
def test_tied_weights_continue_where_one_stage_holds_both_and_where_two_do(
    ranks: Pool, tmp_path: Path, saved_on: int, resumed_on: int
) -> None:
    saved = ranks.run(go, saved_on, "transformer", BY_STAGES[saved_on], 0, 1, str(tmp_path), save=True, wait=True)[0]
    assert equal(read_weights(tmp_path), saved["weights"])
    resumed = ranks.run(go, resumed_on, "transformer", BY_STAGES[resumed_on], 1, 1, str(tmp_path), load=True)
    assert all(equal(result["weights"], saved["weights"]) for result in resumed)


def test_an_engine_can_begin_with_stored_weights_and_none_of_its_own(ranks: Pool, tmp_path: Path) -> None:
    saved = ranks.run(go, 2, "resnet", BY_STAGES[2], 0, 1, str(tmp_path), save=True)[0]
    begun = ranks.run(go, 2, "resnet", BY_STAGES[2], 0, 0, weights=str(tmp_path))
    assert all(equal(result["weights"], saved["weights"]) for result in begun)


@pytest.mark.parametrize("damage", ["cut", "bit", "missing"])
def test_a_torn_checkpoint_is_passed_over(ranks: Pool, tmp_path: Path, damage: str) -> None:
    plan = BY_STAGES[1]
    go("unet", plan, 0, 1, str(tmp_path), save=True)
    good = go("unet", plan, 1, 2, str(tmp_path), load=True, save=True)
    victim = sorted((tmp_path / "step-0000000002").glob("weights-*"))[0]
    content = bytearray(victim.read_bytes())
    if damage == "cut":
        victim.write_bytes(content[: len(content) // 2])
    elif damage == "bit":
        content[-3] ^= 1
        victim.write_bytes(content)
    else:
        victim.unlink()
    with pytest.warns(UserWarning, match="passed over"):
        again = go("unet", plan, 1, 2, str(tmp_path), load=True)
    assert equal(again["weights"], good["weights"])


def test_a_full_disk_keeps_the_last_checkpoint_and_the_run(ranks: Pool, tmp_path: Path) -> None:
    plan = BY_STAGES[2]
    outcomes = ranks.run(save_twice, 2, "unet", plan, str(tmp_path), limit_rank=1)
    for message, loss in outcomes:
        assert "rank 1" in message and "step-0000000001 is still good" in message
        assert loss == outcomes[0][1]
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["latest", "step-0000000001"]
    assert ranks.run(go, 2, "unet", plan, 1, 2, str(tmp_path), load=True)


def test_checkpoints_of_another_model_are_refused(tmp_path: Path) -> None:
    go("unet", BY_STAGES[1], 0, 1, str(tmp_path), save=True)
    with pytest.raises(CheckpointError, match="another model"):
        go("resnet", BY_STAGES[1], 1, 1, str(tmp_path), load=True)
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        go("resnet", BY_STAGES[1], 1, 1, str(tmp_path / "nothing"), load=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, None), (signal.SIGTERM, 143)])
def test_signals_save_first(ranks: Pool, tmp_path: Path, number: int, code: Any) -> None:
    for done, ended in ranks.run(signalled, 2, "unet", BY_STAGES[2], str(tmp_path), number, 1):
        assert ended == code
        assert done == (5 if code is None else 2)
    assert (tmp_path / "latest").read_text().strip() == "step-0000000003"


def _killed(ranks: Pool, path: Path, moments: list[tuple[int, float]]) -> int:
    """Kill runs in turn, each after so many checkpoints and seconds; what the last one, which is left alone, loaded."""
    plan = BY_STAGES[2]
    target = path / "killed"
    oracle = ranks.run(survive, 2, "unet", plan, str(path / "whole"), 6, -1, -1.0)[0][1]
    for i, (saved, moment) in enumerate(moments):
        ranks.outcomes(survive, 2, "unet", plan, str(target), 6, i % 2, moment, saved)
    latest = target / "latest"
    complete = int(latest.read_text().strip().removeprefix("step-")) if latest.exists() else 0
    final = ranks.run(survive, 2, "unet", plan, str(target), 6, -1, -1.0)
    assert [loaded for loaded, _ in final] == [complete] * 2
    assert equal(final[0][1], oracle)
    return complete


@sometimes
def test_nothing_is_lost_beyond_the_last_checkpoint_when_a_rank_is_killed(ranks: Pool, tmp_path: Path) -> None:
    """After two checkpoints; that of the third step may have been complete, or not."""
    assert _killed(ranks, tmp_path, [(2, 0.01)]) in (2, 3)


@pytest.mark.slow
def test_twenty_kills_at_random_moments(ranks: Pool, tmp_path: Path) -> None:
    generator = random.Random(1)
    for run in range(4):
        _killed(ranks, tmp_path / str(run), [(0, generator.uniform(0.0, 0.4)) for _ in range(5)])
