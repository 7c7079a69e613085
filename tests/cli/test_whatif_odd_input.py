"""Odd input of `outcore whatif`: answered as valid JSON, or refused in a sentence, and then nothing is written."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outcore.cli.main import app
from outcore.errors import OutcoreError
from tests.cli.test_whatif import JOB

ODD: dict[str, tuple[str, ...]] = {
    "--if": (
        "", "+", "amp+", "amp+amp", "amp+amp=fp16", "batch=2+batch=4", "batch=²", "batch=0", "batch=-1",
        f"batch={'9' * 20}", "relu:0x", f"relu:{'9' * 400}x", "relu:-1x", "host=free+device=free",
        "forward=free+backward=free+optimizer=free",
        "=free", ":2x", "amp=", "within=-1GiB", "within=1", "link=0x", "link=2x", "graphs=1", "Linear:0.5x+Linear:0.5x",
        "0=free+2=free", "fused+fused_adam", "batch=1", "compile+graphs+amp+channels_last",
    ),
    "--on": ("", ",", "h100,h100", "nothing", "a100, ,h100", "A100", "h100,nothing"),
    "--gpus": ("", ",", "0", "-1", "1.5", "nan", "inf", "1e9", "2,2,1", "1,,2", "two", "1024", "1,2,3,5,7"),
    "--link": ("", "wire", "0gbit", "25gbe ", "nvlink", "1gbit+20ms", "-1gbit", "12GB/s"),
    "--how": (",", "magic", "data_parallel,data_parallel", "gpipe", "gems,1f1b"),
    "--price": ("", ",", "1,2,3", "-1", "nan", "2.5"),
    "--watts": (",", "0", "700"),
    "--batch": ("0", "-3", "x", "5"),
    "--epoch": ("0", "10"),
}  # fmt: skip


def words_of(parts: Iterable[tuple[str, str]]) -> list[str]:
    """A command with these options; what has to be there for them is added."""
    given = dict(parts)
    if not {"--if", "--gpus", "--on"} & given.keys() or "--on" not in given:
        given["--on"] = "v100"
    if {"--link", "--how"} & given.keys():
        given.setdefault("--gpus", "1,2")
    return [word for pair in given.items() for word in pair]


def tried(job: Path, words: list[str]) -> str:
    """What came of a command; a failure that is not a refusal is raised."""
    out = job.parent / "out.json"
    before = set(job.parent.rglob("*"))
    found = CliRunner().invoke(app, ["whatif", str(job), *words, "--json", "-o", str(out)])
    if found.exit_code == 0:
        for text in (found.stdout, out.read_text()):
            json.loads(text, parse_constant=lambda name: pytest.fail(f"{words}: {name} in the JSON"))
        out.unlink()
        return "answered"
    if isinstance(found.exception, OutcoreError):
        assert str(found.exception), words
    elif not isinstance(found.exception, SystemExit) or found.exit_code != 2:
        assert found.exception is not None
        raise AssertionError(f"{words} failed: {found.exception!r}") from found.exception
    after = {path for path in job.parent.rglob("*") if "__pycache__" not in path.parts}
    assert after <= before, f"{words} was refused and wrote {after - before}"
    return "refused"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--gpus", "1.5"), ("--gpus", ","), ("--gpus", "1e9"), ("--on", ","), ("--how", ","), ("--price", "2.5"),
        ("--if", "batch=²"), ("--if", "batch=2+batch=4"), ("--if", "amp+amp=fp16"), ("--if", f"relu:{'9' * 400}x"),
        ("--batch", "0"), ("--link", "wire"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(job: Path, option: str, value: str) -> None:
    assert tried(job, words_of([(option, value)])) == "refused"


def test_a_step_of_which_nothing_is_left_is_still_an_answer(job: Path) -> None:
    assert tried(job, ["--on", "v100", "--if", "host=free+device=free"]) == "answered"


@pytest.mark.slow
def test_any_odd_input_is_answered_or_refused(job: Path) -> None:
    single = [[(option, value)] for option, values in ODD.items() for value in values]
    every = [(option, value) for option, values in ODD.items() for value in values]
    pairs = [list(pair) for pair in itertools.combinations(every, 2) if pair[0][0] != pair[1][0]]
    chosen = [*single, *random.Random(0).sample(pairs, 150)]
    outcomes = [tried(job, words_of(parts)) for parts in chosen]
    assert outcomes.count("answered") > 20 and outcomes.count("refused") > 60
