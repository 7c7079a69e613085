"""Compiled programs compute the gradients of the whole network, and say what they were asked for."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.errors import ProgramError
from outcore.program import (
    Backward,
    Edge,
    OptimizerStep,
    Program,
    Reduce,
    Send,
    Stages,
    check,
    compile_program,
    simulate,
)
from tests.program.networks import stages
from tests.program.toy import Toy, sample, whole


@settings(max_examples=80, deadline=None)
@given(
    stages(),
    st.sampled_from(["model-parallel", "gpipe", "1f1b", "gems-mast", "gems-master"]),
    st.integers(1, 3),
    st.integers(2, 4),
    st.integers(1, 2),
    st.integers(0, 2**32),
)
def test_the_program_steps_every_copy_with_the_gradient_of_the_whole_network(
    network: Stages, schedule: str, micro_batches: int, batches: int, replicas: int, seed: int
) -> None:
    """Long skips, several users, integer values, inverted and data-parallel replicas, odd numbers of ranks."""
    rows = network.to_json()
    for row in rows["stages"]:
        row["gradient_bytes"] = 8
    network = Stages.from_json(rows)
    batches = 2 if schedule == "gems-mast" else batches
    program = compile_program(network, schedule, micro_batches=micro_batches, batches=batches, replicas=replicas)
    check(program, network)
    toy = Toy(program, network, random.Random(seed))
    toy.run()
    samples = [sample(b, p) for p in range(replicas) for b in range(micro_batches * batches)]
    expected = [sum(column) for column in zip(*(whole(network, x) for x in samples), strict=True)]
    held = {(rank, stage) for stage, ranks in program.holders().items() for rank in ranks}
    assert toy.updated == {(rank, stage): expected[stage] for rank, stage in held}
    assert not toy.saved and not any(toy.here)


@pytest.mark.parametrize("schedule", ["model-parallel", "gpipe", "1f1b", "gems-master"])
def test_forwards_alone_evaluate_and_hold_nothing(schedule: str) -> None:
    network = Stages.uniform(4, saved_bytes=100, gradient_bytes=4)
    program = compile_program(network, schedule, micro_batches=3, batches=2, training=False)
    check(program, network)
    assert not any(isinstance(i, Backward | Reduce | OptimizerStep) for row in program.ranks for i in row)
    assert program.in_flight() == (0,) * 4
    timeline = simulate(program, network)
    assert all(curve.parts()["saved"] == 0 for curve in timeline.memory)
    place = f"rank 0, instruction {len(program.ranks[0])} "
    for wrong in (OptimizerStep(0), Reduce(0, (0,))):
        with pytest.raises(ProgramError, match=f"{place}.*no backward of stage 0"):
            check(Program("wrong", ((*program.ranks[0], wrong), *program.ranks[1:])), network)


def test_a_value_goes_straight_to_each_stage_that_uses_it() -> None:
    chain = Stages.uniform(4)
    network = Stages(chain.stages, (*chain.edges, Edge("skip", 0, (2, 3), 4, True), Edge("indices", 1, (3,), 4, False)))
    program = compile_program(network, "gpipe")
    sends = [i for row in program.ranks for i in row if isinstance(i, Send) and i.value in ("skip", "indices")]
    assert [(s.value, s.source, s.target, s.gradient) for s in sends] == [
        ("skip", 0, 2, False),
        ("skip", 0, 3, False),
        ("indices", 1, 3, False),
        ("skip", 2, 0, True),
        ("skip", 3, 0, True),
    ]


@pytest.mark.parametrize("depth", [2, 3, 4, 5])
@pytest.mark.parametrize("replicas", [1, 2])
def test_gems_reduces_each_stage_over_the_ranks_that_hold_it(depth: int, replicas: int) -> None:
    """The middle of an odd number of ranks holds both replicas' stage once, and has nothing to reduce alone."""
    program = compile_program(Stages.uniform(depth, gradient_bytes=4), "gems-mast", replicas=replicas)
    for rank, row in enumerate(program.ranks):
        local, first = rank % depth, rank - rank % depth
        expected = {}
        for stage in {local, depth - 1 - local}:
            starts = range(0, replicas * depth, depth)
            group = sorted({start + place for start in starts for place in (stage, depth - 1 - stage)})
            if len(group) > 1:
                expected[stage] = tuple(group)
        assert {i.stage: i.group for i in row if isinstance(i, Reduce)} == expected
        assert {c.replica for c in program.computes(rank)} == {2 * (first // depth), 2 * (first // depth) + 1}


def test_receives_are_issued_one_compute_early_and_not_all_at_once() -> None:
    chain = Stages.uniform(2)
    text = compile_program(chain, "gpipe", micro_batches=4).text(communication=True)
    assert text.splitlines()[2].startswith("rank 1  x0.0←0 x0.1←0 F0 x0.2←0 F1 x0.3←0 F2 F3 B0")
    late = compile_program(chain, "gpipe", micro_batches=4, ahead=0).text(communication=True)
    assert late.splitlines()[2].startswith("rank 1  x0.0←0 F0 x0.1←0 F1 x0.2←0 F2 x0.3←0 F3 B0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "gpip"}, "no schedule 'gpip'; there are model-parallel, gpipe"),
        ({"schedule": "gpipe", "micro_batches": 0}, "micro_batches is 0; needed at least 1"),
        ({"schedule": "gpipe", "ahead": -1}, "ahead is -1; needed 0"),
        ({"schedule": "gems-mast", "batches": 3}, "takes 2 batches before a reduction, got 3; gems-master"),
    ],
)
def test_what_cannot_be_compiled_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        compile_program(Stages.uniform(2), **arguments)  # type: ignore[arg-type]


def test_stages_are_checked_when_made() -> None:
    stage = Stages.uniform(1).stages[0]
    for edges, message in (
        ([Edge("x", 1, (1,), 1, True)], "needed targets after it"),
        ([Edge("x", 0, (), 1, True)], "needed targets after it"),
        ([Edge("x", 0, (2,), 1, True)], "below 2"),
        ([Edge("x", 0, (1,), 1, True)] * 2, "two edges"),
    ):
        with pytest.raises(ProgramError, match=message):
            Stages((stage, stage), tuple(edges))
    with pytest.raises(ProgramError, match="0 stages"):
        Stages((), ())
