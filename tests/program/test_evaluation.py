"""Memory of forwards alone: what a stage makes for others is held until the last of them has it, and not longer."""

import random

import pytest

from outcore.machine import Link
from outcore.program import Edge, Links, Stage, Stages, compile_program, simulate
from tests.program.networks import random_stages

WIRE = Links(Link.symmetric(bandwidth_bytes_per_s=4.0, latency_s=0.5))


def test_a_value_that_two_stages_read_is_held_until_both_have_it() -> None:
    stages = tuple(Stage((), 1.0, 2.0, 100, 0, 0, 0, 0) for _ in range(3))
    network = Stages(stages, (Edge("skip", 0, (1, 2), 8, True), Edge("next", 1, (2,), 4, True)))
    timeline = simulate(compile_program(network, "gpipe", micro_batches=1, training=False), network, WIRE)
    sends = [e for e in timeline.events if e.rank == 0 and e.stream == "send"]
    assert len(sends) == 2 and timeline.peak_bytes[0] == 8
    first, last = sorted(e.end_s for e in sends)
    curve = dict(zip(timeline.memory[0].times_s, timeline.memory[0].bytes, strict=True))
    assert curve.get(first, 8) == 8 and curve[last] == 0
    assert timeline.peak_bytes[2] == 12 and timeline.memory[2].bytes[-1] == 0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("schedule", ["model-parallel", "gpipe", "1f1b", "gems-master"])
def test_every_rank_ends_with_what_it_always_holds(schedule: str, training: bool) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        network = random_stages(rng, rng.randint(2, 5))
        program = compile_program(network, schedule, micro_batches=3, batches=2, training=training)
        for links in (None, WIRE):
            timeline = simulate(program, network, links)
            for rank, curve in enumerate(timeline.memory):
                own = [network.stages[s] for s, ranks in program.holders().items() if rank in ranks]
                always = sum(s.parameter_bytes + s.gradient_bytes + s.state_bytes for s in own)
                assert curve.bytes[-1] == always, (seed, rank)
