"""Who am I: launchers' variables, the launcher from Python, its restarts; data for ranks; the arena."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outcore.errors import EngineError
from outcore.graph import Value
from outcore.run.engine.batch import cut, describe, fingerprint, meta_batch, parts, rows
from outcore.run.engine.build import take_own_memory
from outcore.run.engine.loader import Loader, cut_epoch
from outcore.run.ranks.launch import launch
from outcore.run.ranks.world import identify
from outcore.run.transport.p2p import HostRows, TensorLayout
from tests.foreign.sample import sometimes
from tests.run.launched import once_more, train_given, train_two
from tests.run.pool import Pool
from tests.run.training import plain, train
from tests.run.varying import PIPE


def test_variables_of_launchers_are_read() -> None:
    torchrun = identify({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"})
    assert torchrun is not None and (torchrun.rank, torchrun.size, torchrun.local_rank, torchrun.port) == (2, 4, 1, 7)
    slurm = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "70012"}
    found = identify(slurm | {"SLURM_STEP_NODELIST": "node[07-09,11]"})
    assert found is not None and (found.address, found.port, found.rank) == ("node07", 15000 + 70012 % 20000, 3)
    assert identify(slurm | {"SLURM_STEP_NODELIST": "big,small"}).address == "big"  # type: ignore[union-attr]
    for rank, size in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ):
        assert identify({rank: "1", size: "2"}).rank == 1  # type: ignore[union-attr]
    assert identify({}) is None
    for wrong in (
        {"RANK": "first"},
        {"WORLD_SIZE": "many"},
        {"MASTER_PORT": "http"},
        {"RANK": "7"},
        {"MASTER_PORT": "99999"},
    ):
        with pytest.raises(EngineError, match=r"must be a number|ranks go from 0 to 3, ports up to 65535"):
            identify({"RANK": "2", "WORLD_SIZE": "4"} | wrong)
    # Inside sbatch, but not in a step: one process.
    assert identify({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None


def test_mpirun_over_several_hosts_is_told_the_first_of_them() -> None:
    two = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(EngineError, match=r"4 ranks, 2 of them on this host.*mpirun -x MASTER_ADDR="):
        identify(two)
    assert identify(two | {"MASTER_ADDR": "node07"}).address == "node07"  # type: ignore[union-attr]
    assert identify(two | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).address == "127.0.0.1"  # type: ignore[union-attr]
    for size, here in (("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"), ("PMI_SIZE", "MPI_LOCALNRANKS")):
        rank = size.replace("SIZE", "RANK")
        with pytest.raises(EngineError, match="MASTER_ADDR"):
            identify({rank: "0", size: "2", here: "1"})


@pytest.mark.slow
def test_ranks_are_launched_from_python() -> None:
    oracle = plain("unet", 4)
    assert [losses == pytest.approx(oracle["losses"]) for losses in launch(train_two, 2)] == [True, True]


@pytest.mark.slow
def test_ranks_that_are_given_a_model_do_not_train_the_same_memory() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    before, plain = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    for found in launch(train_given, 2, model, x, y):
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        plain.load_state_dict(before)
        for _ in range(2):
            plain.zero_grad()
            nn.functional.mse_loss(plain(x), y).backward()
            with torch.no_grad():
                [p.sub_(0.5 * p.grad) for p in plain.parameters()]  # type: ignore[func-returns-value, operator]
        assert all((found[name] - value).abs().max() < 1e-12 for name, value in plain.state_dict().items())


def test_what_processes_share_becomes_a_rank_s_own() -> None:
    """As torch.multiprocessing.spawn hands models over."""
    model = nn.BatchNorm1d(3).share_memory()
    values = copy.deepcopy(model.state_dict())
    shared = list(model.state_dict().values())
    take_own_memory(model)
    [t.add_(1) for t in shared]  # type: ignore[func-returns-value]
    assert not any(t.is_shared() for t in model.state_dict().values())
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())


@sometimes
def test_a_restart_resumes_from_the_last_checkpoint(tmp_path: Path) -> None:
    whole = launch(once_more, 2, str(tmp_path / "whole"), False)
    killed = launch(once_more, 2, str(tmp_path / "killed"), True, restarts=1)
    assert all(torch.equal(t, killed[0][n]) for n, t in whole[0].items())
    with pytest.raises(EngineError, match="rank 1"):
        launch(once_more, 2, str(tmp_path / "given up"), True)


def test_batches_are_cut_in_rows_and_described() -> None:
    batch = {
        "x": torch.arange(10).view(5, 2),
        "scale": torch.tensor(2.0),
        "flag": True,
        "pair": (torch.ones(5), [None]),
    }
    assert rows(batch) == 5 and parts(5, 2) == [3, 2]
    first, second = cut(batch, 5, [3, 2])
    assert first["x"].tolist() == [[0, 1], [2, 3], [4, 5]] and second["pair"][0].shape == (2,)
    assert first["scale"] is batch["scale"] and first["flag"] is True and second["pair"][1] == [None]
    meta = meta_batch(describe(batch))
    assert (
        meta["x"].is_meta and meta["x"].shape == (5, 2) and fingerprint(describe(meta)) == fingerprint(describe(batch))
    )
    with pytest.raises(EngineError, match="cannot know"):
        meta_batch(describe([object()]))


@pytest.mark.parametrize(
    ("samples", "batch_size", "replicas"), [(10, 4, 2), (9, 4, 2), (7, 3, 3), (12, 4, 1), (5, 8, 2)]
)
def test_an_epoch_has_every_sample_once(samples: int, batch_size: int, replicas: int) -> None:
    data = [(torch.tensor(float(i)), i) for i in range(samples)]

    def of(replica: int, **more: Any) -> Loader:
        options = {"wanted": True, "shuffle": True, "seed": 5, "workers": 0, "collate": None} | more
        return Loader(data, batch_size, replica=replica, replicas=replicas, **options)

    loaders = [of(r) for r in range(replicas)]
    for _ in range(2):
        drawn = [[targets.tolist() for _, targets in loader] for loader in loaders]
        assert len({len(d) for d in drawn}) == 1 and all(all(d) for d in drawn)
        assert sorted(i for d in drawn for batch in d for i in batch) == list(range(samples))
    assert loaders[0].epoch == 2
    whole = [t.tolist() for _, t in of(0, shuffle=True)]
    again = of(0)
    for i, _ in enumerate(again):
        if i == 0:
            break
    resumed = of(0)
    resumed.load(again.state())
    assert [t.tolist() for _, t in resumed] == (whole[1:] or [t.tolist() for _, t in again])
    assert list(of(0, wanted=False)) == [(None, None)] * len(loaders[0])
    assert len(cut_epoch(range(samples), batch_size, replicas)) == len(loaders[0])


def test_a_row_of_the_arena_is_free_when_nobody_holds_it() -> None:
    arena = HostRows()
    first = arena.take(64)
    tensor = first.view(torch.float32)[:4]
    place = first.data_ptr()
    del first
    assert arena.take(64).data_ptr() != place
    del tensor
    gc.collect()
    assert arena.take(64).data_ptr() in {row.data_ptr() for row in arena.rows()} and arena.nbytes == 128
    arena.end_step()
    arena.end_step()
    assert arena.nbytes == 0


def test_tensors_travel_in_their_own_layout() -> None:
    def value(tensor: torch.Tensor) -> Value:
        size = tensor.numel() * tensor.element_size()
        return Value("v", tuple(tensor.shape), tensor.stride(), "float32", size, True, None, (), None)

    image = torch.randn(2, 3, 4, 5)
    for tensor in (image, image.contiguous(memory_format=torch.channels_last), image.transpose(1, 3), image[:, :1]):
        layout = TensorLayout.of(value(tensor))
        row = torch.empty(layout.nbytes, dtype=torch.uint8)
        row.copy_(layout.flat(tensor).view(torch.uint8))
        arrived = layout.view(row)
        assert torch.equal(arrived, tensor)
        dense = tensor.numel() == tensor.untyped_storage().nbytes() // 4
        assert not dense or arrived.stride() == tensor.stride()
    channels_last = image.contiguous(memory_format=torch.channels_last)
    layout = TensorLayout.of(value(channels_last))
    assert torch.equal(layout.view(layout.flat(image).view(torch.uint8)), image)


def test_workers_are_used_again_and_worlds_do_not_mix(ranks: Pool) -> None:
    first, second = ranks.run(train, 2, "indices", PIPE), ranks.run(train, 2, "indices", PIPE)
    assert first[0]["losses"] == second[0]["losses"]
