"""Every option of every command with words that are no answer to it.

The options are those of the commands themselves, so a new one is tried too. Whatever is typed is taken, or refused in a
sentence; a refusal writes nothing, and nothing that was there is changed unless the word itself names it to be written.
"""

from __future__ import annotations

import importlib
import random
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from outcore.cli.common.help_text import worded
from outcore.cli.main import _FILES, COMMANDS, app
from outcore.data import write_slides
from tests.cli.command import outcore_command

pytestmark = pytest.mark.filterwarnings("ignore")  # of what is taken
JOB = """
import torch
from torch import nn

size = 2


def model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(784, 3))


def batch(size):
    return torch.rand(size, 3, 16, 16), torch.randint(3, (size,))


def optimizer(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr)
"""
PLAIN = {
    "graph": "job.py",
    "profile": "job.py --on v100",
    "plan": "job.py --on v100",
    "simulate": "job.py plan.json --on v100x2",
    "verify": "job.py --steps 1",
    "whatif": "job.py --on v100",
    "sweep": "job.py --set lr=0.1,0.2 --steps 2 --no-measure -o out",
    "train": "job.py --steps 1 --epochs 1 --out out",
    "infer": "job.py --data data/train.npy --untrained",
    "report": "done",
    "explore": "job.py --export page.html --seconds 0 --on v100",
    "machine": "--on v100",
}
"""What each command is given beside the odd word; `bench` and `demo` train for a while whatever is typed."""
NUMBERS = ["0", "-1", "1.5", "x", "", "9" * 25, "²", "1e400", "nan", "-inf", "0x10", " 2 "]
TEXTS = ["", " ", ",", "x", "-", "é", "a\nb", "0", "-1", "nan", "%", "0%", "1,,2", "[1]", "{", "x" * 300, "9" * 30]
TEXTS += ["a=b", "[red]x[/red]", "²", "²x2"]
PATHS = ["", ".", "folder", "empty", "binary", "missing", "none/x", "list.json", "null.json", "deep.json"]
PATHS += ["x" * 300, "~"]
SHAPES = ["", "x", "0x3x16x16", "-1x3x16x16", "1x3xx16", "1x3x16x16:foo", "=1x3", "9999999999x3x9999999x99999999"]
SETTINGS = ["", "=", "x=", "=1", "x", "lr=", "lr=x", "lr=2:1:log", "lr=0:1:log", "lr=1e400", "batch=0", "batch=1e400"]
SETTINGS += ["seed=x", f"seed={'9' * 30}", "nothing=1", "lr=0.1 lr", "lr=1:2:3:4"]
TAKES_LONG = {"--epochs", "--steps", "--accumulate", "--trials", "--ranks", "--members", "--workers", "--devices"}
"""Options by which a user may ask for work without end: of their numbers only those that are none are tried."""
LEFT_OUT = {"--open", "--fresh", "--calibrate", "--measure", "--verify", "--help"}
"""Options that open a browser or measure for minutes."""


def words_for(param: Any) -> list[str]:
    kind = (param.metavar or "").upper()
    if re.match(r"[NX]( |$)", kind):
        return [n for n in NUMBERS if not TAKES_LONG & set(param.opts) or n not in ("9" * 25, "1e400")]
    if "SHAPE" in kind:
        return SHAPES
    if "NAME=" in kind or "SECTION" in kind:
        return SETTINGS
    if kind in ("PATH", "FILE", "JOB", "RUN", "PLAN") or param.name in ("data", "weights", "out", "resume", "on"):
        return [*PATHS, *TEXTS]
    return TEXTS


def cases() -> Iterator[list[str]]:
    for command, plain in PLAIN.items():
        function = getattr(importlib.import_module(f"outcore.cli.{_FILES.get(command, command)}"), command)
        params = worded(typer.main.get_command(app).get_command(None, command).params, function)  # type: ignore[attr-defined]
        arguments = [param for param in params if param.param_type_name == "argument"]
        for param in params:
            if LEFT_OUT & set(param.opts):
                continue
            given, option = plain.split(), param.opts[0]
            for word in [None] if getattr(param, "is_flag", False) else words_for(param):
                if param in arguments:
                    place = arguments.index(param)
                    there = place < len(given) and not given[place].startswith("-")
                    yield [command, *given[:place], str(word), *given[place + there :]]
                elif word is None:
                    yield [command, *given, option]
                elif short := next((name for name in param.opts if name in given), None):
                    at = given.index(short) + 1
                    yield [command, *given[:at], word, *given[at + 1 :]]
                else:
                    yield [command, *given, option, word]


CASES = list(cases())
QUICK = random.Random(0).sample([case for case in CASES if case[0] in ("graph", "machine", "report", "simulate")], 40)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "folder").mkdir()
    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(256)) * 8)
    for name, text in (("list", "[1, 2]"), ("null", "null"), ("deep", "[" * 100_000)):
        (folder / f"{name}.json").write_text(text)
    (folder / "job.py").write_text(JOB)
    write_slides(folder / "data", 1, size=(64, 64), form="npy", name="train.csv")
    next((folder / "data").glob("*.npy")).rename(folder / "data" / "train.npy")
    for words in ("plan job.py --on v100x2 -o plan.json", "train job.py --steps 1 --epochs 1 --device cpu --out done"):
        assert outcore_command(*words.split(), folder=folder).returncode == 0
    return folder


def state(folder: Path) -> dict[Path, bytes | None]:
    return {
        path: path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


def check(words: list[str], work: Path, folder: Path) -> None:
    """One command in a copy of the folder."""
    shutil.copytree(work, folder)
    before = state(folder)
    shown = outcore_command(*words, folder=folder)
    assert "Traceback" not in shown.stdout + shown.stderr, words
    assert shown.returncode in (0, 1, 2), words
    after = state(folder)
    if shown.returncode:
        assert after == before, (words, "a refusal wrote or removed something")
        assert shown.stderr.strip() and len(shown.stderr) < 2500, (words, shown.stderr)
        assert shown.returncode == 2 or shown.stderr.count("error: ") == 1, (words, shown.stderr)
    else:
        changed = [path for path in before if after.get(path) != before[path]]
        assert all(str(path.relative_to(folder)) in words or "done" in path.parts for path in changed), (words, changed)
        assert after[folder / "job.py"] == JOB.encode(), words
    shutil.rmtree(folder)
    for name in [name for name, module in sys.modules.items() if str(folder) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def test_every_command_that_works_for_a_moment_is_tried() -> None:
    assert set(COMMANDS) - set(PLAIN) == {"bench", "demo", "lsp"} and len(CASES) > 1500


@pytest.mark.parametrize("words", QUICK, ids=lambda words: repr(" ".join(words))[:60])
def test_odd_words_are_taken_or_refused_in_a_sentence(words: list[str], work: Path, tmp_path: Path) -> None:
    check(words, work, tmp_path / "here")


@pytest.mark.slow
@pytest.mark.parametrize("command", PLAIN)
def test_every_option_with_every_odd_word(command: str, work: Path, tmp_path: Path) -> None:
    for words in [case for case in CASES if case[0] == command]:
        check(words, work, tmp_path / "here")
