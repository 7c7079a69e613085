"""Passes over tiles: what a script may not do, and the sentence that says so."""

from __future__ import annotations

import pytest

from outcore.errors import ProgramError
from outcore.program import Backward, Forward, Program, Stage, Stages, check
from outcore.program.script import Action, Drop, Pass, Run, Tile

CALLS = ("conv", "norm", "scale", "pool", "fc")
ONE = Stages((Stage(CALLS, 1.0, 2.0, 0, 0, 0, 0, 0),), ())


def tiles(name: str, count: int = 3) -> list[Action]:
    return [Tile(name, index) for index in range(count)]


FIRST = Pass("first", 3, ("conv", "norm"), makes=("statistics",))
BETWEEN = Run(("scale",), reads=("statistics",), makes=("shift",))
SECOND = Pass("second", 3, ("conv", "norm", "pool"), reads=("shift",), makes=("map",))
TAIL = Run(("fc",), reads=("map",))
FORWARD = [FIRST, *tiles("first"), BETWEEN, SECOND, *tiles("second"), TAIL]


def back(action: Pass) -> Pass:
    return Pass(action.name, action.count, action.calls, action.reads, action.makes, gradient=True)


BACKWARD = [TAIL, back(SECOND), *tiles("second"), BETWEEN, back(FIRST), *tiles("first")]


def checked(forward: list[Action], backward: list[Action] | None) -> None:
    instructions = [Forward(0, 0, script=tuple(forward))]
    if backward is not None:
        instructions.append(Backward(0, 0, script=tuple(backward)))  # type: ignore[arg-type]
    check(Program("tiles", (tuple(instructions),)), ONE)


def without(script: list[Action], *places: int) -> list[Action]:
    return [action for place, action in enumerate(script) if place not in places]


def swapped(script: list[Action], a: int, b: int) -> list[Action]:
    changed = list(script)
    changed[a], changed[b] = changed[b], changed[a]
    return changed


def test_a_step_in_passes_is_checked_with_and_without_its_backward() -> None:
    checked(FORWARD, BACKWARD)
    checked(FORWARD, None)
    checked(swapped(FORWARD, 1, 3), swapped(BACKWARD, 2, 4))  # tiles of a pass come in any order


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (without(FORWARD, 2), "'scale' begins in its script, and of 'first' the tiles 1 have not been computed"),
        (without(FORWARD, 7), "'fc' begins in its script, and of 'second' the tiles 1 have not"),
        ([*FORWARD[:3], FORWARD[2], *FORWARD[3:]], "computes tile 1 of 'first' twice"),
        (swapped(FORWARD, 2, 7), "computes tile 1 of 'second' while 'first' is under way"),
        (FORWARD[1:], "computes tile 0 of 'first' while no pass is under way"),
        ([*FORWARD[:4], Tile("first", 3), *FORWARD[4:]], "tile 3 of 'first', which has 3 tiles"),
        (without(FORWARD, 4), "never computes 'scale'"),
        ([*FORWARD[5:9], *FORWARD[:5], TAIL], "begins 'second', which reads 'shift': that is not whole there"),
        ([*FORWARD[:-1], *FORWARD[:4], TAIL], "begins 'first' twice"),
        (without(FORWARD, 9), "never computes 'fc'"),
        ([*FORWARD[:5], BETWEEN, *FORWARD[5:]], "computes 'scale' twice"),
        ([*FORWARD[:9], Drop("map"), TAIL], "begins 'fc', which reads 'map': that is not whole there"),
    ],
)
def test_a_forward_that_leaves_out_or_comes_too_early_is_refused_by_name(forward: list[Action], reason: str) -> None:
    for backward in (BACKWARD, None):
        with pytest.raises(ProgramError) as refused:
            checked(forward, backward)
        assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("backward", "reason"),
    [
        ([], "never sends 'first' back"),
        (without(BACKWARD, 3), "'scale' begins in its script, and of 'second' the tiles 1 have not"),
        (without(BACKWARD, 8), "the backward ends in its script, and of 'first' the tiles 1 have not been computed"),
        ([*BACKWARD, BACKWARD[8]], "computes tile 1 of 'first' twice"),
        (without(BACKWARD, 5), "sends 'first' back before 'scale', which reads it"),
        (without(BACKWARD, 0), "sends 'second' back before 'fc', which reads it"),
        ([TAIL, *BACKWARD[6:], *BACKWARD[1:6]], "sends 'first' back before 'scale', which reads it"),
        ([*BACKWARD, *BACKWARD[6:]], "sends 'first' back twice"),
        ([*BACKWARD[:6], FIRST, *tiles("first")], "again without gradients"),
        ([*BACKWARD[:6], Pass("first", 2, FIRST.calls, gradient=True), *tiles("first", 2)], "other tiles of 'first'"),
        ([Drop("shift"), *BACKWARD], "begins 'second', which reads 'shift': that is not whole there"),
        ([*BACKWARD, Pass("third", 0, gradient=True)], "'third' back, which no forward ran"),
    ],
)
def test_a_backward_that_is_not_the_other_direction_is_refused_by_name(backward: list[Action], reason: str) -> None:
    with pytest.raises(ProgramError) as refused:
        checked(FORWARD, backward)
    assert reason in str(refused.value)


def test_a_pass_that_was_sent_back_at_once_is_not_sent_back_again() -> None:
    once = Pass("only", 2, CALLS, makes=("map",), gradient=True)
    forward: list[Action] = [once, *tiles("only", 2)]
    checked(forward, [])
    with pytest.raises(ProgramError, match="sends 'only' back twice"):
        checked(forward, forward)
