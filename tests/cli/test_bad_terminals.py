"""Every command on narrow, dumb, closed and non-UTF-8 terminals, in folders that take no files and on full disks: no
traceback, no half a file, and an exit code that says whether it worked."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from outcore.cli.common.streams import plain_warnings, readable_streams
from outcore.cli.main import COMMANDS
from outcore.documents.reading import write_text
from outcore.errors import OutcoreError
from outcore.machine.probe import cache_directory
from tests.cli.command import outcore_command
from tests.cli.terminals import Surroundings, draw_surroundings, guarded, run_command

JOB = """
import torch
from torch import nn

def model(width=4):
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), pool)

def batch(size):
    return torch.rand(size, 3, 32, 32), torch.randint(2, (size,))

def optimizer(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr)
"""
LINES = {
    "graph": "graph job.py --svg out.svg --html out.html",
    "graph as a tree": "graph job.py --depth 3",
    "profile": "profile job.py --svg out.svg -o out.json",
    "profile sizes": "profile job.py --batch 1,2,4",
    "plan": "plan job.py --svg out.svg -o out.json",
    "plan of two": "plan job.py --devices 2 -o out.json",
    "simulate": "simulate job.py given/plan.json --svg out.svg --trace out.json",
    "verify": "verify job.py --memory 95%",
    "sweep": "sweep job.py --set lr=0.1,0.01 --steps 2 -o out.folder",
    "whatif": "whatif job.py --if amp -o out.json",
    "whatif of more": "whatif job.py --gpus 1,2 --on v100 --svg out.svg",
    "bench": "bench --only nothing",
    "machine": "machine --list",
    "machine saved": "machine --on v100x2 -o out.json",
    "train": "train job.py --steps 2 --device cpu --out out.folder",
    "train on": "train job.py --epochs 2 --steps 2 --device cpu --out given/run",
    "report": "report given/run -o out.html",
    "infer": "infer job.py -w given/run --data given/slides/train-000.tif -o out.csv",
    "explore": "explore job.py --export out.html --seconds 0",
    "lsp": "lsp",
    "demo": "demo --side 256 --out out.folder",
    "help": "--help",
    "help of one": "plan --help",
    "version": "--version",
    "a typing error": "prof job.py",
    "no job": "profile nothing.py",
}
"""Every command, most with files to write."""
EACH = int(os.environ.get("OUTCORE_TERMINALS", "3"))


def test_every_command_has_a_line() -> None:
    assert {line.split()[0] for line in LINES.values()} >= set(COMMANDS)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from outcore.data import write_slides

    home = tmp_path_factory.mktemp("given")
    (home / "job.py").write_text(JOB)
    write_slides(home / "given/slides", 1, size=(64, 64), tile=32, name="train.csv")
    for words in (
        "plan job.py --machine v100x2 --devices 2 -o given/plan.json",
        "train job.py --steps 2 --device cpu --out given/run",
    ):
        shown = outcore_command(*words.split(), folder=home)
        assert shown.returncode == 0, shown.stderr
    yield home


def cases() -> Iterator[tuple[str, Surroundings]]:
    for name in LINES:
        draw = random.Random(name)
        yield from ((name, draw_surroundings(draw)) for _ in range(EACH))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "around"), list(cases()), ids=lambda v: v if isinstance(v, str) else "")
def test_no_command_breaks(name: str, around: Surroundings, given: Path, tmp_path: Path) -> None:
    words, cache = LINES[name].split(), tmp_path / "cache"
    folder = tmp_path / "folder"
    folder.mkdir()
    (cache / "outcore").mkdir(parents=True)
    for kept in cache_directory().glob("machine-*.json"):  # else each would measure this machine anew
        shutil.copy(kept, cache / "outcore")
    for one in given.iterdir():
        (folder / one.name).symlink_to(one)
    with guarded(folder, around.folder == "read-only"), guarded(cache / "outcore", around.cache == "read-only"):
        ended = run_command(words, around, folder, cache)
    said = f"{' '.join(words)} in {around}: {ended}"
    assert ended.code in (0, 1, 2), said
    printed = ended.stdout + ended.stderr
    assert "Traceback" not in printed and "Exception ignored" not in printed, said
    assert ended.code == 0 or around.stdout != "pipe" or printed.strip(), said
    written = list(folder.glob("out.*"))
    if any(w.startswith("out.") for w in words) and around.folder != "ordinary":
        assert ended.code == 1 or (around.folder == "full" and ended.code == 0), said  # what is small is still written
        assert ended.code == 0 or "error" in ended.stderr or around.stdout == "closed", said  # nobody listens
    for path in written:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix in (".svg", ".html"):
            assert path.read_text(encoding="utf-8").rstrip().endswith(f"</{path.suffix[1:]}>"), said


def test_no_number_is_cut_off_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    (tmp_path / "job.py").write_text(JOB)
    for words in (["profile", "--frontier"], ["profile", "--batch", "1,2"]):
        shown = outcore_command(words[0], "job.py", "--on", "v100", *words[1:], folder=tmp_path)
        assert shown.returncode == 0 and "step" in shown.stdout and "…" not in shown.stdout, shown


def test_a_stream_gets_the_nearest_characters_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"ascii": "3 us ### 2x ...", "latin-1": "3 µs ### 2× ...", "utf-8": "3 µs ███ 2× …"}
    for encoding, expected in wanted.items():
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
        readable_streams()
        print("3 µs ███ 2× …", end="", flush=True)
        assert raw.getvalue().decode(encoding) == expected


@pytest.mark.parametrize("seed", range(4))
def test_columns_stay_where_they_are_on_a_stream_without_their_characters(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, raw = random.Random(seed), io.BytesIO()
    table = Table(box=None, pad_edge=False)
    for justify in ("left", "left", "right", "left"):
        table.add_column("step", justify=justify, no_wrap=True)  # type: ignore[arg-type]
    words = ["3→8", "1×2", "a long name…", "12 µs", "plain", "✓", "███", "图", "·"]
    for _ in range(12):
        table.add_row(*(draw.choice(words) + " " + draw.choice(words) for _ in range(3)), "end")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    readable_streams()
    Console(width=70).print(table)
    sys.stdout.flush()
    lines = raw.getvalue().decode("ascii").splitlines()[1:]
    assert len(lines) == 12 and {line.rstrip().endswith("end") for line in lines} == {True}
    assert len({len(line.rstrip()) for line in lines}) == 1, "\n".join(lines)


def test_warnings_of_our_own_are_sentences_and_others_as_python_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = _shown
        plain_warnings()
        warnings.warn("outcore: this call is larger than planned", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert capsys.readouterr().err == "warning: this call is larger than planned\nby Python: something else\n"


def _shown(message: Warning | str, *place: Any, **options: Any) -> None:
    print(f"by Python: {message}", file=sys.stderr)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path, link = tmp_path / "a.svg", tmp_path / "link.svg"
    write_text(path, "µ one")
    link.symlink_to(path)
    write_text(link, "µ two")
    assert link.is_symlink() and path.read_text(encoding="utf-8") == "µ two"
    with pytest.raises(OutcoreError, match=r"missing/b\.svg cannot be written: No such file"):
        write_text(tmp_path / "missing" / "b.svg", "x")
    small = tmp_path / "small"
    small.mkdir()
    (small / "a.json").write_text("[1]")
    ended = run_command(["machine", "--on", "v100x2", "-o", "a.json"], Surroundings(folder="full"), small, tmp_path)
    assert ended.code == 1 and "a.json" in ended.stderr and (small / "a.json").read_text() == "[1]", ended
    assert [p.name for p in small.iterdir()] == ["a.json"]
