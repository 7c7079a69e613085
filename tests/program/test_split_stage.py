"""A first stage on several ranks: who computes, who sends, and over whom gradients are added up."""

from outcore.program import Forward, OptimizerStep, Receive, Reduce, Send, Stages, compile_program
from outcore.program.compile import split_first_stage


def test_two_replicas_whose_first_stage_is_on_two_ranks_each() -> None:
    network = Stages.uniform(3, gradient_bytes=4)
    program = split_first_stage(compile_program(network, "gpipe", micro_batches=2, replicas=2), 2, 2)
    assert len(program) == 8
    stages = [{i.stage for i in row if isinstance(i, Forward)} for row in program.ranks]
    assert stages == [{0}, {0}, {1}, {2}, {0}, {0}, {1}, {2}]
    ways = {(i.source, i.target) for row in program.ranks for i in row if isinstance(i, Send)}
    assert ways == {(0, 2), (2, 0), (2, 3), (3, 2), (4, 6), (6, 4), (6, 7), (7, 6)}
    for rank, row in enumerate(program.ranks):
        assert all(i.source == rank for i in row if isinstance(i, Send))
        assert all(i.target == rank for i in row if isinstance(i, Receive))
    groups = [[i.group for i in row if isinstance(i, Reduce)] for row in program.ranks]
    first, second, third = [(0, 1, 4, 5)], [(2, 6)], [(3, 7)]
    assert groups == [first, first, second, third, first, first, second, third]


def test_parts_of_one_replica_are_added_up_before_the_step() -> None:
    network = Stages.uniform(2, gradient_bytes=4)
    program = split_first_stage(compile_program(network, "1f1b", micro_batches=2), 3, 1)
    for row in program.ranks[:3]:
        assert row.index(Reduce(0, (0, 1, 2))) < row.index(OptimizerStep(0))
    assert not any(isinstance(i, Reduce) for i in program.ranks[3])
