"""Which stage holds which memory, against the sentences that define it, piece by piece and stage by stage."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outcore.planner.partition.stage_memory import INPUT, SharedMemoryUse, StageMemory, merged


def held(uses: list[SharedMemoryUse], stage_of: list[int], count: int) -> list[int]:
    """A stage holds what a unit of it saves; and what crosses a border, if it makes it or reads it."""
    found = [0] * count
    for use in uses:
        stages = {stage_of[unit] for unit in use.savers}
        made = None if use.producer == INPUT else stage_of[use.producer]
        for reader in [stage_of[unit] for unit in use.users] + [count - 1] * use.to_loss:
            if reader != made:
                stages |= {reader} if made is None else {reader, made}
        for stage in stages:
            found[stage] += use.bytes
    return found


@pytest.mark.parametrize("seed", range(20))
def test_every_stage_holds_what_it_saves_and_what_crosses_its_borders(seed: int) -> None:
    draw, units, count = random.Random(seed), 7, 3
    uses = []
    for n in range(9):
        producer = draw.choice([INPUT, *range(units)])
        readers = tuple(sorted(draw.sample([u for u in range(units) if u != producer], draw.randint(0, 3))))
        savers = tuple(sorted(draw.sample(range(units), draw.randint(0, 2))))
        uses.append(SharedMemoryUse(f"v{n}", 1 << n, producer, readers, savers, draw.random() < 0.3))
    parameters = [(f"p{n}", 1 << n, tuple(draw.sample(range(units), draw.randint(1, 3)))) for n in range(5)]
    stage_of = [draw.randrange(count) for _ in range(units)]
    memory = StageMemory(uses, parameters[:3], parameters[3:])
    numbers = np.array(stage_of)
    assert memory.held(numbers, count) == held(uses, stage_of, count)
    for rows, found in (
        (parameters[:3], memory.trained(numbers, count)),
        (parameters[3:], memory.fixed(numbers, count)),
    ):
        expected = [sum(size for _, size, users in rows if s in {stage_of[u] for u in users}) for s in range(count)]
        assert found == expected


def test_nothing_takes_nothing() -> None:
    empty = StageMemory([], [], [])
    assert empty.held(np.array([0, 1]), 2) == empty.trained(np.array([0, 1]), 2) == [0, 0]


def test_parameters_of_the_same_users_are_one() -> None:
    rows = [("a", 1, (0, 1)), ("b", 2, (1,)), ("c", 4, (0, 1)), ("d", 8, (1, 0))]
    assert merged(rows) == (("a", 5, (0, 1)), ("b", 2, (1,)), ("d", 8, (1, 0)))
