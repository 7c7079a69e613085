"""Programs print one line per rank, save, load and compare."""

import doctest
import importlib
import json
import pkgutil
import re
from pathlib import Path

import pytest
from hypothesis import given, settings

import outcore.program
from outcore.errors import ProgramError
from outcore.program import (
    Backward,
    Forward,
    OptimizerStep,
    Program,
    Stages,
    compile_program,
    rich_gantt,
    schedules,
    simulate,
)
from outcore.program.script import Decode, Encode, Evict, Fetch, Pass, Recompute, Run, Tile, Wait
from tests.program.networks import programs

SCRIPTED = Program(
    "scripted",
    (
        (
            Forward(
                0,
                0,
                0,
                (
                    Pass("first", 2, ("f",), makes=("y",), on_host=("y",), ahead=3, gradient=True, saves=8),
                    Tile("first", 1, 4, 0.2, 0.1, 16),
                    Tile("first", 0),
                    Run(("a", "b"), 0.5, reads=("y",)),
                    Evict("a:out", 8),
                    Encode("b:out", "bits", 4, 0.1),
                ),
            ),
            Backward(
                0, 0, 0, (Fetch("a:out", 8), Wait("a:out"), Decode("b:out", "bits", 4), Recompute("d", ("e",), 2))
            ),
            OptimizerStep(0),
        ),
    ),
)


@settings(max_examples=60, deadline=None)
@given(programs())
def test_a_program_reads_back_equal(case: tuple[Stages, Program]) -> None:
    network, program = case
    assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program
    assert Stages.from_json(json.loads(json.dumps(network.to_json()))) == network


def test_scripts_are_saved_with_it(tmp_path: Path) -> None:
    SCRIPTED.save(tmp_path / "program.json")
    assert Program.load(tmp_path / "program.json") == SCRIPTED
    assert len((tmp_path / "program.json").read_text().splitlines()) == 7


def test_it_prints_what_each_rank_computes_with_a_prime_for_the_second_replica() -> None:
    program = compile_program(Stages.uniform(2, gradient_bytes=4), "gems-mast", replicas=2)
    assert str(program) == "\n".join(
        ["gems-mast: 4 ranks, 48 instructions", *(f"rank {r}  F0 B0 F1' B1' R0 R1 U0 U1" for r in range(4))]
    )


def test_many_ranks_are_cut_short_in_print() -> None:
    program = compile_program(Stages.uniform(40), "gpipe")
    assert str(program).splitlines()[-1] == "… 8 more ranks"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"do": "forwards", "stage": 0},
            "rank 0, instruction 1: no instruction 'forwards'; there are forward, backward",
        ),
        ({"do": "forward", "stage": 0}, "rank 0, instruction 1: .*micro_batch"),
        ({"do": "forward", "stage": 0, "micro_batch": 0, "script": [{"do": "evade"}]}, "no script action 'evade'"),
        ({"do": "forward", "stage": 0, "micro_batch": 0, "script": [{"do": "evict"}]}, "script action.*value"),
    ],
)
def test_a_program_written_by_hand_is_refused_with_the_place_of_the_mistake(
    row: dict[str, object], message: str
) -> None:
    good = {"do": "forward", "stage": 0, "micro_batch": 0}
    with pytest.raises(ProgramError, match=message):
        Program.from_json({"version": 1, "name": "by hand", "ranks": [[good, row]]})
    with pytest.raises(ProgramError, match="version is 7"):
        Program.from_json({"version": 7})


@pytest.mark.parametrize(
    ("schedule", "depth", "sizes"),
    [
        ("model-parallel", 4, {"batches": 2}),
        ("gpipe", 3, {"micro_batches": 3}),
        ("1f1b", 3, {"micro_batches": 4}),
        ("gems-master", 3, {"batches": 3}),
    ],
)
def test_the_timeline_in_a_schedules_docstring_is_what_it_does(
    schedule: str, depth: int, sizes: dict[str, int]
) -> None:
    stages = Stages.uniform(depth)
    timeline = simulate(compile_program(stages, schedule, **sizes), stages)
    drawn = re.findall(r"^rank \d+  (\S+)", rich_gantt(timeline, columns=int(timeline.step_s)).plain, re.M)
    written = re.findall(r"rank \d+  (\S+)", schedules.SCHEDULES[schedule].order.__doc__ or "")
    assert written == drawn


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(outcore.program.__path__)])
def test_examples_in_docstrings_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"outcore.program.{name}"))
    assert result.failed == 0
