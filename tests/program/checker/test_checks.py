"""Compiled programs keep the rules; programs broken in ways that are surely wrong are refused, with the place named."""

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.errors import OutcoreError, ProgramError
from outcore.machine import Link
from outcore.program import (
    Backward,
    Forward,
    Instruction,
    Links,
    OptimizerStep,
    Program,
    Receive,
    Reduce,
    Send,
    Stages,
    assemble,
    check,
    compile_program,
    simulate,
)
from outcore.program.script import Decode, Encode, Evict, Fetch, Recompute, Run, Wait
from tests.program.networks import programs, random_stages, stages
from tests.program.toy import Toy, sample, whole

Case = tuple[Stages, Program]
SLOW = Links(Link.symmetric(bandwidth_bytes_per_s=8.0, latency_s=0.25))


@settings(max_examples=80, deadline=None)
@given(programs())
def test_every_schedule_of_any_network_is_valid_and_ends(case: Case) -> None:
    network, program = case
    check(program, network)
    for links in (None, SLOW):
        timeline = simulate(program, network, links)
        check(program, network, memory_bytes=timeline.peak_bytes, links=links)
        for curve in timeline.memory:
            assert not curve.bytes or curve.bytes[-1] == sum(curve.peak_parts[:3]), "something is left beside the model"


@settings(max_examples=60, deadline=None)
@given(stages(least=2), st.integers(1, 3), st.randoms(use_true_random=False))
def test_several_stages_may_share_a_rank(network: Stages, micro_batches: int, rng) -> None:
    """Any placement, in an order that every rank can follow: all forwards by stage, then all backwards."""
    rank_of = [rng.randrange(len(network)) for _ in range(len(network))]
    orders: list[list[Forward | Backward]] = [[] for _ in network.stages]
    for micro_batch in range(micro_batches):
        for stage, rank in enumerate(rank_of):
            orders[rank].append(Forward(stage, micro_batch))
    for micro_batch in range(micro_batches):
        for stage, rank in reversed(list(enumerate(rank_of))):
            orders[rank].append(Backward(stage, micro_batch))
    program = assemble(network, orders, name="shared")
    check(program, network)
    toy = Toy(program, network, random.Random(0))
    toy.run()
    expected = [
        sum(column) for column in zip(*(whole(network, sample(b, 0)) for b in range(micro_batches)), strict=True)
    ]
    assert toy.updated == {(rank_of[s], s): expected[s] for s, stage in enumerate(network.stages) if stage.trains}
    timeline = simulate(program, network, SLOW)
    for curve in timeline.memory:
        assert not curve.bytes or curve.bytes[-1] == sum(curve.peak_parts[:3])


def mutate(program: Program, rank: int, change: list[Instruction]) -> Program:
    return Program("broken", (*program.ranks[:rank], tuple(change), *program.ranks[rank + 1 :]))


@settings(max_examples=120, deadline=None)
@given(programs(least=2, trained=True), st.data())
def test_a_program_without_any_one_of_its_instructions_is_refused(case: Case, data: st.DataObject) -> None:
    network, program = case
    rank = data.draw(st.sampled_from([r for r, row in enumerate(program.ranks) if row]))
    position = data.draw(st.integers(0, len(program.ranks[rank]) - 1))
    row = list(program.ranks[rank])
    del row[position]
    with pytest.raises(ProgramError, match=r"rank \d+, instruction \d+ \("):
        check(mutate(program, rank, row), network)


@settings(max_examples=120, deadline=None)
@given(programs(least=2, trained=True), st.data())
def test_an_instruction_written_twice_or_for_another_is_refused(case: Case, data: st.DataObject) -> None:
    network, program = case
    rank = data.draw(st.sampled_from([r for r, row in enumerate(program.ranks) if row]))
    position = data.draw(st.integers(0, len(program.ranks[rank]) - 1))
    row = list(program.ranks[rank])
    instruction = row[position]
    changes: list[list[Instruction]] = [[instruction, instruction]]
    match instruction:
        case Forward() | Backward():
            changes.append([replace(instruction, micro_batch=99)])
            changes.append([replace(instruction, replica=99)])
            changes.append([replace(instruction, stage=(instruction.stage + 1) % len(network))])
        case Send():
            changes.append([replace(instruction, target=(instruction.target + 1) % len(program))])
            changes.append([replace(instruction, source=instruction.source + 1)])
            changes.append([replace(instruction, micro_batch=99)])
            changes.append([replace(instruction, gradient=not instruction.gradient)])
            changes.append([replace(instruction, value="no such value")])
        case Receive():
            changes.append([replace(instruction, source=(instruction.source + 1) % len(program))])
            changes.append([replace(instruction, stage=instruction.stage - 1)])
            changes.append([replace(instruction, micro_batch=99)])
        case Reduce():
            changes.append([replace(instruction, group=instruction.group[1:])])
            changes.append([replace(instruction, group=(*instruction.group, 98))])
        case OptimizerStep():
            changes.append([replace(instruction, stage=(instruction.stage + 1) % len(network)), instruction])
            changes.append([OptimizerStep(99)])
    row[position : position + 1] = data.draw(st.sampled_from(changes))
    with pytest.raises(ProgramError, match=r"rank \d+, instruction \d+ \("):
        check(mutate(program, rank, row), network)


@settings(max_examples=120, deadline=None)
@given(programs(least=2, trained=True), st.data())
def test_two_instructions_in_the_wrong_order_are_refused(case: Case, data: st.DataObject) -> None:
    """Exchanged: a forward and its backward, two transfers of a channel, a compute and what it needs, gives or ends."""
    network, program = case
    rank = data.draw(st.sampled_from([r for r, row in enumerate(program.ranks) if row]))
    row = list(program.ranks[rank])
    pairs = [(i, j) for j in range(len(row)) for i in range(j) if bound(row[i], row[j], network)]
    first, second = data.draw(st.sampled_from(pairs))
    row[first], row[second] = row[second], row[first]
    with pytest.raises(ProgramError, match=r"rank \d+, instruction \d+ \("):
        check(mutate(program, rank, row), network)


def bound(first: Instruction, second: Instruction, network: Stages) -> bool:
    """Whether one must come before the other, whatever stands between them."""
    match first, second:
        case Forward(), Backward():
            return replace(second, script=()) == Backward(first.stage, first.micro_batch, first.replica)
        case (Send(), Send()) | (Receive(), Receive()):
            a, b = ((t.source, t.target, t.replica) for t in (first, second))  # type: ignore[union-attr]
            return a == b
        case Receive(), (Forward() | Backward()):
            user = network_source(network, first.value) if first.gradient else first.stage
            wanted = Backward if first.gradient else Forward
            return isinstance(second, wanted) and (second.stage, second.micro_batch, second.replica) == (
                user,
                first.micro_batch,
                first.replica,
            )
        case ((Forward() | Backward()), Send()):
            maker = second.stage if second.gradient else network_source(network, second.value)
            wanted = Backward if second.gradient else Forward
            return isinstance(first, wanted) and (first.stage, first.micro_batch, first.replica) == (
                maker,
                second.micro_batch,
                second.replica,
            )
        case ((Backward() | Reduce()), (OptimizerStep() | Reduce())):
            return first.stage == second.stage
    return False


def network_source(network: Stages, value: str) -> int:
    return next(edge.source for edge in network.edges if edge.value == value)


@settings(max_examples=150, deadline=None)
@given(programs(least=2, trained=True), st.data())
def test_what_passes_after_any_exchange_still_computes_the_same(case: Case, data: st.DataObject) -> None:
    """Any two instructions of a rank exchanged: refused, or the toy engine ends with the same gradients."""
    network, program = case
    rank = data.draw(st.sampled_from([r for r, row in enumerate(program.ranks) if len(row) > 1]))
    row = list(program.ranks[rank])
    first = data.draw(st.integers(0, len(row) - 2))
    second = data.draw(st.integers(first + 1, min(first + 4, len(row) - 1)))
    row[first], row[second] = row[second], row[first]
    changed = mutate(program, rank, row)
    try:
        check(changed, network)
    except ProgramError:
        return
    before, after = (Toy(p, network, random.Random(0)) for p in (program, changed))
    before.run()
    after.run()
    assert after.updated == before.updated
    simulate(changed, network, SLOW)


def test_reductions_in_opposite_order_are_a_deadlock() -> None:
    chain = Stages.uniform(2, gradient_bytes=4)
    good = compile_program(chain, "gems-mast")
    row = list(good.ranks[0])
    first, second = (i for i, instruction in enumerate(row) if isinstance(instruction, Reduce))
    row[first], row[second] = row[second], row[first]
    with pytest.raises(ProgramError, match=r"rank 0, instruction \d+ \(R1\): deadlock: .*group"):
        check(mutate(good, 0, row), chain)


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    """Both replicas of GEMS: each rank wants the backward of the other's replica before it begins its own forward."""
    chain = Stages.uniform(2)
    orders = [
        [Forward(1, 1, 1), Backward(1, 1, 1), Forward(0, 0, 0), Backward(0, 0, 0)],
        [Forward(1, 0, 0), Backward(1, 0, 0), Forward(0, 1, 1), Backward(0, 1, 1)],
    ]
    with pytest.raises(ProgramError, match=r"rank 0, instruction \d+ \(F1\): deadlock: it waits for rank 1"):
        check(assemble(chain, orders, name="crossed"), chain)
    with pytest.raises(ProgramError, match="never gets"):
        simulate(assemble(chain, orders, name="crossed"), chain)


def test_a_program_over_its_cap_is_refused_with_both_numbers() -> None:
    chain = Stages.uniform(3, saved_bytes=1024)
    program = compile_program(chain, "gpipe", micro_batches=4)
    check(program, chain, memory_bytes=4096)
    reason = "rank 0, at F3: needs 4.0 KiB (saved 4.0 KiB); the cap is 3.9 KiB"
    with pytest.raises(ProgramError, match=re.escape(reason)):
        check(program, chain, memory_bytes=4000)
    with pytest.raises(ProgramError, match="rank 1, at F3"):
        check(program, chain, memory_bytes=[4096, 10, 4096])
    with pytest.raises(ProgramError, match="got 2 memory caps"):
        check(program, chain, memory_bytes=[1, 2])


def test_the_error_is_ours_and_a_value_error() -> None:
    with pytest.raises(ValueError, match="computes nothing"):
        check(Program("empty", ((),)), Stages.uniform(1))
    assert issubclass(ProgramError, OutcoreError)


ONE = Stages.uniform(1)


def alone(*instructions: Instruction) -> Program:
    return Program("by hand", (instructions,))


def test_scripts_use_only_what_is_there() -> None:
    forward = (Run(("conv",), 1.0), Evict("x", 8), Encode("r", "bits", 4), Run(("fc",), 1.0))
    backward = (Fetch("x", 8), Decode("r", "bits", 4), Wait("x"), Recompute("b", ("bn",), 2), Run(("conv",), 2.0))
    check(alone(Forward(0, 0, 0, forward), Backward(0, 0, 0, backward)), ONE)
    for first, second, reason in (
        (forward, backward[1:], "not fetched"),
        (forward, (backward[1],), "'x' was evicted and is never fetched"),
        (forward[:1], backward, "fetches 'x', which was not evicted"),
        (forward[:2], backward, "decodes 'r'"),
        ((*forward, Evict("x", 8)), backward, "gone already"),
    ):
        with pytest.raises(ProgramError, match=reason):
            check(alone(Forward(0, 0, 0, first), Backward(0, 0, 0, second)), ONE)


def test_random_networks_cover_what_they_should() -> None:
    found = [edge for seed in range(50) for edge in random_stages(random.Random(seed), 5).edges]
    assert any(len(edge.targets) > 2 for edge in found)
    assert any(edge.targets[0] > edge.source + 1 for edge in found)
    assert any(not edge.has_gradient for edge in found)
