"""What a synthesis chooses from: every named schedule of as many micro-batches, and orders as good as the best one."""

import pytest

from outcore.program import Forward, Stages, synthesise
from outcore.program.synthesis.synthesis import named_programs
from tests.program.synthesis.test_synthesis import ONE, kind_of


def test_named_schedules_have_all_micro_batches_in_every_division() -> None:
    programs = list(named_programs(Stages.uniform(2), 6))
    for program in programs:
        forwards = [i for row in program.ranks for i in row if isinstance(i, Forward)]
        assert len({(i.stage, i.micro_batch) for i in forwards}) == len(forwards) == 12, program.name
    assert sorted(p.name for p in programs).count("gpipe") == 3  # batches of 2, of 3 and of all 6
    assert sum(p.name.startswith("gems") for p in programs) == 3  # of 1, 2 and 3


@pytest.mark.parametrize(("depth", "count"), [(2, 2), (3, 4), (4, 8)])
def test_an_order_of_one_replica_takes_no_longer_than_the_best_one_there_is(depth: int, count: int) -> None:
    found = synthesise(Stages.uniform(depth, saved_bytes=1), micro_batches=count).candidates
    assert min(c.step_s for c in found if kind_of(c) == ONE) == 3 * (count + depth - 1)
