"""Shared memory between ranks of one host: the same numbers as through sockets, and rows that are used again."""

from __future__ import annotations

import gc
from itertools import product
from typing import Any

import pytest
import torch

from outcore.run.ranks.world import World
from outcore.run.transport.all_reduce import DirectAllReduce
from outcore.run.transport.shared_memory import SharedRows
from tests.foreign.sample import one_in
from tests.run.pool import Pool
from tests.run.training import train

BYTES = 1 << 16


def _exchange() -> dict[str, Any]:
    """Rank 0 sends three rows, the second while the first is still held; rank 1 says what it saw."""
    world = World.join(timeout_s=20.0)
    shared_rows = SharedRows(world, torch.device("cpu"))
    places, sums = [], []
    held: Any = None
    for turn in range(3):
        if world.rank == 0:
            row = shared_rows.take(BYTES)
            row.tensor.fill_(turn + 1)
            places.append(row.tensor.data_ptr())
            shared_rows.send_row(row, 1, turn)
        else:
            got = shared_rows.receive(0, turn, BYTES).view(torch.float32)[1:]
            sums.append(int(got.view(torch.uint8).unique()))
            if turn == 0:
                held = got
            elif turn == 1:
                sums.append(int(held.view(torch.uint8).unique()))
                held = None
            del got
            gc.collect()
        world.barrier()
    idle = shared_rows.idle_bytes
    shared_rows.close()
    shared_memory_ranks = sorted(shared_rows.shared_memory_ranks)
    world.close()
    return {"places": places, "sums": sums, "idle": idle, "near": shared_memory_ranks}


def test_a_row_is_used_again_when_its_reader_has_let_go(ranks: Pool) -> None:
    sender, reader = ranks.run(_exchange, 2)
    first, second, third = sender["places"]
    assert first != second and third in (first, second)
    assert reader["sums"] == [1, 2, 1, 3]
    assert reader["idle"] == 2 * BYTES and sender["near"] == []


def _train(case: str, plan: dict[str, Any], apart: bool = False) -> Any:
    meet = SharedRows._meet

    def alone(self: SharedRows, world: World) -> Any:
        pids, pipes, _ = meet(self, world)
        return pids, pipes, frozenset()

    if apart:
        SharedRows._meet = alone  # type: ignore[method-assign]
    try:
        return train(case, plan)
    finally:
        SharedRows._meet = meet  # type: ignore[method-assign]


PLANS = [{"stages": 2, "schedule": "1f1b", "micro_batches": 4}, {"stages": 2, "schedule": "gems", "batches": 4}]


@pytest.mark.parametrize(("plan", "case"), one_in(2, product(PLANS, ["unet", "indices"])))
def test_shared_memory_and_sockets_carry_the_same(ranks: Pool, plan: dict[str, Any], case: str) -> None:
    ours, theirs = ranks.run(_train, 2, case, plan), ranks.run(_train, 2, case, plan, apart=True)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["losses"] == other["losses"]
        assert all(torch.equal(t, other["weights"][n]) for n, t in mine["weights"].items())


def _add_up(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    """Two rows that this rank adds up with the others, the second started before the first is waited for."""
    world = World.join(timeout_s=20.0)
    shared_rows = SharedRows(world, torch.device("cpu"))
    assert shared_rows.connect(range(world.size), 1 << 30)
    found = []
    for turn in range(2):  # rows of the first are used again
        drawn = [torch.Generator().manual_seed(10 * turn + rank) for rank in range(world.size)]
        rows = [torch.randn(count, generator=drawn[world.rank], dtype=dtype) for _ in range(2)]
        begun = [DirectAllReduce(row, world.rank, range(world.size), 7, shared_rows) for row in rows]
        for reduce in begun:
            reduce.add()
        for reduce in begun:
            reduce.wait()
        found += rows
    world.barrier()
    shared_rows.close()
    world.close()
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("dtype", "count"), [(torch.float64, 3), (torch.float64, 10_001), (torch.float32, 4_099)])
def test_rows_are_added_up_in_shared_memory(ranks: Pool, size: int, dtype: torch.dtype, count: int) -> None:
    results = ranks.run(_add_up, size, dtype, count)
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))
    for turn in range(2):
        drawn = [torch.Generator().manual_seed(10 * turn + rank) for rank in range(size)]
        for number in range(2):
            oracle = sum(torch.randn(count, generator=g, dtype=dtype).double() for g in drawn)
            error = (results[0][2 * turn + number].double() - oracle).abs().max()
            assert error <= (1e-12 if dtype == torch.float64 else 1e-5)


def _agree() -> list[Any]:
    """What ranks exchange in every step, with the second begun before the first is waited for."""
    world = World.join(timeout_s=20.0)
    shared_rows = SharedRows(world, torch.device("cpu"))
    world.exchange = shared_rows.exchange
    few, many = (torch.full((count,), 0.1 * (world.rank + 1), dtype=torch.float64) for count in (3, 20_000))
    numbers, *sums = world.start_numbers([world.rank, -7]), world.start_sum(few), world.start_sum(many)
    for wait in reversed(sums):
        wait()
    found = [numbers(), few, many[:1]]
    world.barrier()
    shared_rows.close()
    world.close()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_what_ranks_agree_on_in_a_step_needs_no_gloo(ranks: Pool, size: int) -> None:
    total = 0.1 * size * (size + 1) / 2
    for numbers, few, many in ranks.run(_agree, size):
        assert numbers == [[rank, -7] for rank in range(size)]
        assert few.tolist() == pytest.approx([total] * 3) and many.tolist() == pytest.approx([total])
