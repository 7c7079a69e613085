"""What the simulator waits for: the last of a group, and the end of a copy out before it comes back."""

from __future__ import annotations

from outcore.machine import Link
from outcore.program import Backward, Forward, Links, OptimizerStep, Program, Reduce, Stage, Stages
from outcore.program import simulate as simulated
from outcore.program.script import Evict, Fetch, Run, Wait


def test_a_reduction_begins_when_the_last_of_its_group_has_come() -> None:
    """Two replicas of a stage, one of which computes twice as much: 3 s and 6 s; 8 bytes at 4 per second over two."""
    stages = Stages((Stage((), 1.0, 2.0, 0, 0, 8, 8, 0, optimizer_s=1.0),), ())
    reduce, step = Reduce(0, (0, 1)), OptimizerStep(0)
    short = (Forward(0, 0, 0), Backward(0, 0, 0), reduce, step)
    long = (Forward(0, 0, 1), Backward(0, 0, 1), Forward(0, 1, 1), Backward(0, 1, 1), reduce, step)
    for ranks in ((short, long), (long, short)):
        program = Program("uneven", ranks)
        timeline = simulated(program, stages, Links(Link.symmetric(bandwidth_bytes_per_s=4.0)))
        assert {(e.rank, e.start_s, e.end_s) for e in timeline.events if e.stream == "reduce"} == {(0, 6, 8), (1, 6, 8)}
        assert timeline.step_s == 6 + 2 + 1


def test_what_is_still_on_its_way_out_comes_back_only_afterwards() -> None:
    """A copy of 4 s out begins at 1 s; asked for at 1 s, it comes back from 5 s to 9 s, whichever way is free."""
    stages = Stages((Stage((), 1.0, 2.0, 8, 0, 0, 0, 0),), ())
    forward = Forward(0, 0, 0, (Run(("a",), 1.0), Evict("a", 8)))
    backward = Backward(0, 0, 0, (Fetch("a", 8), Wait("a"), Run(("a",), 2.0)))
    program = Program("hasty", ((forward, backward),))
    timeline = simulated(program, stages, Links(host=Link.symmetric(bandwidth_bytes_per_s=2.0)))
    copies = {e.stream: (e.start_s, e.end_s) for e in timeline.events if e.stream.startswith("copy")}
    assert copies == {"copy out": (1, 5), "copy in": (5, 9)}
    assert timeline.step_s == 9 + 2
