from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.errors import ProgramError
from outcore.program import Edge, Stage, Stages, check, compile_program, simulate
from tests.program.networks import stages
from tests.program.toy import Toy, sample, whole

FOLD = (0, 1, 2, 1, 0)


@settings(max_examples=60, deadline=None)
@given(
    stages(least=2),
    st.sampled_from(["model-parallel", "gpipe", "1f1b"]),
    st.integers(1, 4),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
def test_any_placement_computes_the_gradients_of_the_whole(
    network: Stages, schedule: str, micro_batches: int, replicas: int, rng: random.Random
) -> None:
    ranks = rng.randint(1, len(network))
    placement = [*range(ranks), *(rng.randrange(ranks) for _ in range(len(network) - ranks))]
    rng.shuffle(placement)
    program = compile_program(network, schedule, micro_batches=micro_batches, replicas=replicas, placement=placement)
    assert len(program) == ranks * replicas
    check(program, network)
    toy = Toy(program, network, rng)
    toy.run()
    expected = [0] * len(network)
    for pipeline in range(replicas):
        for micro_batch in range(micro_batches):
            for stage, gradient in enumerate(whole(network, sample(micro_batch, pipeline))):
                expected[stage] += gradient
    assert {stage for _, stage in toy.updated} == {k for k, stage in enumerate(network.stages) if stage.trains}
    for (_, stage), gradient in toy.updated.items():
        assert gradient == expected[stage]


def test_a_fold_is_pipelined() -> None:
    """The outer rank goes on with the next micro-batch while the first is with the others."""
    chain = Stages.uniform(5)
    one = simulate(compile_program(chain, "gpipe", placement=FOLD), chain).step_s
    four = simulate(compile_program(chain, "gpipe", micro_batches=4, placement=FOLD), chain).step_s
    assert one == 15 and 4 * 6 <= four < 4 * 15 * 0.6


def test_what_two_stages_of_a_rank_share_counts_once() -> None:
    """Rank 0 holds a skip of 10 bytes once, and each of its stages 1 byte more."""
    outer, inner = Stage((), 1.0, 2.0, 11, 0, 0, 0, 0), Stage((), 1.0, 2.0, 2, 0, 0, 0, 0)
    edges = (Edge("a", 0, (1,), 0, True), Edge("skip", 0, (2,), 10, False), Edge("b", 1, (2,), 0, True))
    network = Stages((outer, inner, outer), edges)
    apart = simulate(compile_program(network, "gpipe"), network).peak_bytes
    folded = simulate(compile_program(network, "gpipe", placement=(0, 1, 0)), network).peak_bytes
    assert apart == (11, 2, 11) and folded == (12, 2)


def test_placements_that_cannot_be_are_refused() -> None:
    chain = Stages.uniform(4)
    with pytest.raises(ProgramError, match="gems-mast places the stages of its two replicas itself"):
        compile_program(chain, "gems-mast", placement=(0, 1, 1, 0))
    with pytest.raises(ProgramError, match=r"placement \[0, 2, 2, 0\] must name a rank for each of 4 stages"):
        compile_program(chain, "gpipe", placement=(0, 2, 2, 0))
