"""Each rule of a program, broken alone, is the reason that is given; what keeps the rules is not refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from outcore.errors import ProgramError
from outcore.program import (
    Backward,
    Forward,
    Instruction,
    OptimizerStep,
    Program,
    Receive,
    Reduce,
    Send,
    Stages,
    check,
    compile_program,
)

CHAIN = Stages.uniform(2, gradient_bytes=4)
PLAIN = compile_program(CHAIN, "gpipe", micro_batches=2)
"""Rank 0: F0, sends, F1, sends, receives two gradients, B0, B1, U0. Rank 1: receives two, F0, F1, B0, sends, B1, ..."""
PAIRED = compile_program(CHAIN, "gems-mast")
Row = list[Instruction]


def without(row: Row, *which: Instruction) -> Row:
    return [instruction for instruction in row if instruction not in which]


def moved(row: Row, which: Instruction, place: int) -> Row:
    kept = without(row, which)
    return [*kept[:place], which, *kept[place:]]


def pick(program: Program, rank: int, kind: type[Instruction], **fields: object) -> Instruction:
    rows = [i for i in program.ranks[rank] if isinstance(i, kind)]
    return next(i for i in rows if all(getattr(i, name) == value for name, value in fields.items()))


def broken(program: Program, *changes: tuple[int, Callable[[Row], Row]]) -> Program:
    ranks = [list(row) for row in program.ranks]
    for rank, change in changes:
        ranks[rank] = change(ranks[rank])
    return Program("broken", tuple(tuple(row) for row in ranks))


F1, B1 = pick(PLAIN, 0, Forward, micro_batch=1), pick(PLAIN, 0, Backward, micro_batch=1)
SENT = pick(PLAIN, 0, Send, micro_batch=1)
GIVEN = pick(PLAIN, 1, Receive, micro_batch=1)
BACK = pick(PLAIN, 0, Receive, micro_batch=1)
REDUCED, STEPPED = pick(PAIRED, 0, Reduce, stage=0), pick(PAIRED, 0, OptimizerStep, stage=0)
LAST = pick(PAIRED, 0, Backward, stage=0)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (broken(PLAIN, (0, lambda row: without(row, F1))), r"\(B1\): its forward is missing"),
        (broken(PLAIN, (0, lambda row: without(row, B1))), r"\(F1\): its backward is missing"),
        (
            broken(PLAIN, (0, lambda row: moved(row, F1, len(row)))),
            r"\(B1\): its forward comes after it, at instruction 8",
        ),
        (
            broken(PLAIN, (1, lambda row: without(row, *(i for i in row if getattr(i, "micro_batch", 0) == 1)))),
            r"rank 0, .*\(F1\): stage 1 of replica 0 never computes micro-batch 1",
        ),
        (
            broken(PLAIN, (1, lambda row: without(row, GIVEN))),
            "it needs 'x0' of micro-batch 1 from rank 0, and no receive",
        ),
        (
            broken(PLAIN, (1, lambda row: moved(row, GIVEN, 4))),
            "it needs 'x0' of micro-batch 1, which is received later",
        ),
        (broken(PLAIN, (0, lambda row: without(row, SENT))), "rank 0 never sends 'x0' of micro-batch 1"),
        (
            broken(PLAIN, (0, lambda row: moved(row, SENT, 0))),
            "'x0' of micro-batch 1 is made by .*; it can only be sent after",
        ),
        (
            broken(PLAIN, (0, lambda row: without(row, BACK))),
            "it needs the gradient of 'x0' of micro-batch 1 from rank 1",
        ),
        (
            broken(PLAIN, (1, lambda row: [replace(i, source=1) if i == GIVEN else i for i in row])),
            "the other end is rank 1; needed another of 2 ranks",
        ),
        (broken(PLAIN, (1, lambda row: [row[1], row[0], *row[2:]])), "transfers arrive in the order they are sent"),
        (
            broken(PAIRED, (0, lambda row: moved(row, REDUCED, 0))),
            "a backward of stage 0 comes after it, at instruction",
        ),
        (
            broken(PAIRED, (0, lambda row: without(row, REDUCED))),
            r"stage 0 is on ranks \[0, 1\] and is not reduced over them",
        ),
        (broken(PAIRED, (0, lambda row: without(row, STEPPED))), "the optimizer never steps stage 0 on rank 0"),
        (
            broken(PAIRED, (0, lambda row: moved(row, STEPPED, 8))),
            "a backward or the reduction of stage 0 comes after it",
        ),
        (
            broken(PLAIN, (0, lambda row: moved(row, row[-1], 7))),
            "a backward or the reduction of stage 0 comes after it",
        ),
        (
            broken(PAIRED, (0, lambda row: [replace(i, group=(0,)) if i == REDUCED else i for i in row])),
            r"it is over ranks \[0\]; stage 0 is on \[0, 1\]",
        ),
        (broken(PLAIN, (0, lambda row: [*row, OptimizerStep(1)])), "no backward of stage 1 is on rank 0"),
        (broken(PLAIN, (0, lambda row: [*row, Reduce(1, (0,))])), "no backward of stage 1 is on rank 0"),
    ],
)
def test_the_rule_that_is_broken_is_named(program: Program, reason: str) -> None:
    with pytest.raises(ProgramError, match=reason):
        check(program, CHAIN)


def test_transfers_that_nobody_needs_are_refused() -> None:
    """Both stages are on one rank, and send to each other all the same."""
    computes = (Forward(0, 0), Forward(1, 0), Backward(1, 0), Backward(0, 0), OptimizerStep(0), OptimizerStep(1))
    check(Program("one rank", (computes, ())), CHAIN)
    sent = Send("x0", 1, 0, 1, 0)
    for rows in (((*computes, sent), ()), (computes, (Receive("x0", 1, 0, 1, 0),))):
        with pytest.raises(ProgramError, match="nobody needs this transfer"):
            check(Program("one rank", rows), CHAIN)


def test_on_one_rank_a_value_is_made_before_it_is_used() -> None:
    wrong = (Forward(1, 0), Forward(0, 0), Backward(1, 0), Backward(0, 0), OptimizerStep(0), OptimizerStep(1))
    with pytest.raises(ProgramError, match=r"'x0' of micro-batch 0 is made after it, at instruction 1"):
        check(Program("one rank", (wrong,)), CHAIN)
    back = (Forward(0, 0), Forward(1, 0), Backward(0, 0), Backward(1, 0), OptimizerStep(0), OptimizerStep(1))
    with pytest.raises(ProgramError, match=r"the gradient of 'x0' of micro-batch 0 is made after it, at instruction 3"):
        check(Program("one rank", (back,)), CHAIN)


def test_forwards_alone_are_a_program_and_frozen_stages_need_no_step() -> None:
    check(Program("evaluation", ((Forward(0, 0), Forward(1, 0)),)), CHAIN)
    frozen = Stages.uniform(2)
    computes = (Forward(0, 0), Forward(1, 0), Backward(1, 0), Backward(0, 0))
    check(Program("frozen", (computes,)), frozen)
