"""Programs of written orders: the same as those of schedules, and whole when cut short."""

from __future__ import annotations

import random

import pytest

from outcore.errors import ProgramError
from outcore.program import Links, Stages, check, compile_program
from outcore.program.instructions import Backward, Forward
from outcore.program.list_scheduler import synthesised_orders
from outcore.program.written_order import program_in_order, write_order
from tests.program.networks import random_stages


@pytest.mark.parametrize(("schedule", "numbers"), [("1f1b", (4, 1)), ("gpipe", (4, 1)), ("gems-master", (1, 4))])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_schedule_that_is_written_down_is_the_same_program(
    schedule: str, numbers: tuple[int, int], replicas: int
) -> None:
    stages = random_stages(random.Random(0), 3)
    wanted = compile_program(stages, schedule, micro_batches=numbers[0], batches=numbers[1], replicas=replicas)
    rows = write_order([[i for i in row if isinstance(i, Forward | Backward)] for row in wanted.ranks[:3]])
    made = program_in_order(stages, rows, inverted=schedule == "gems-master", replicas=replicas)
    assert made.ranks == wanted.ranks


def test_orders_cut_short_still_end() -> None:
    stages = random_stages(random.Random(1), 3)
    tried = 0
    for setting, orders in synthesised_orders(stages, 5, None, Links()):
        for pieces in range(1, 6):
            program = program_in_order(
                stages, write_order(orders), inverted=setting.inverted, micro_batches=pieces, replicas=2
            )
            check(program, stages)
            assert {c.micro_batch for rank in range(3) for c in program.computes(rank)} == set(range(pieces))
            tried += 1
    assert tried > 50


def test_an_order_in_which_ranks_wait_for_ever_is_refused() -> None:
    """Each rank goes forward on the replica of which the other has the first stage."""
    with pytest.raises(ProgramError):
        stages = Stages.uniform(2)
        check(program_in_order(stages, ("F1 F0 B0 B1", "F0 F1 B1 B0"), inverted=True), stages)
