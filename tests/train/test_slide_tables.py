"""Tables as people have them: slides of many sizes, one slide in two lines, a validation without one of the classes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from outcore.errors import ConfigError, DataError
from outcore.train.examples.examples import find_tables
from outcore.train.settings.config import DataConfig

from .running import run

JOB = """
import torch
from outcore.models import SlideNet

def model():
    return SlideNet()

def batch(size):
    return torch.rand(size, 3, 64, 64), torch.randint(2, (size,))
"""
SIDES = (96, 64, 160, 128, 80)


def write_tables(folder: Path, sides: tuple[int, ...] = SIDES, **tables: str) -> None:
    """Slides of these sides, named by their numbers, and tables of (number, label) separated by blanks."""
    (folder / "job.py").write_text(JOB)
    random = np.random.default_rng(0)
    for number, side in enumerate(sides):
        np.save(folder / f"{number}.npy", random.integers(255, size=(3, side, side), dtype=np.uint8))
    for name, lines in tables.items():
        pairs = [line.split("=") for line in lines.split()]
        (folder / f"{name}.csv").write_text("path,label\n" + "".join(f"{n}.npy,{label}\n" for n, label in pairs))


def tables_of(folder: Path, validation: str | float) -> tuple[list[object], list[object]]:
    named = str(folder / validation) if isinstance(validation, str) else validation
    train, held = find_tables(DataConfig(train=str(folder / "train.csv"), validation=named), 0)
    assert held is not None
    rows = [e.table.rows if e.rows is None else [e.table.rows[i] for i in e.rows] for e in (train, held)]
    return tuple([(row.path.stem, row.label) for row in one] for one in rows)  # type: ignore[return-value]


@pytest.mark.parametrize("memory", ["1100KiB", "720KiB"])
def test_a_budget_holds_for_the_largest_slide_wherever_it_is_in_the_order(tmp_path: Path, memory: str) -> None:
    write_tables(tmp_path, train="0=0 1=1 2=0 3=1 4=0")
    words = (f"data.train={tmp_path / 'train.csv'}", f"plan.memory={memory}", "train.epochs=3")
    code, said = run(tmp_path / "job.py", tmp_path / "run", *words)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert code == 0 and "input up to 1x3x160x160" in said and "warning" not in said
    assert facts["measured"]["peak_bytes"] <= 1.02 * facts["budget_bytes"]


def test_the_time_of_an_epoch_is_that_of_slides_of_mean_size(tmp_path: Path) -> None:
    write_tables(tmp_path, train="0=0 1=1 2=0 3=1 4=0")
    run(tmp_path / "job.py", tmp_path / "run", f"data.train={tmp_path / 'train.csv'}")
    (tmp_path / "train.csv").write_text("path,label\n" + "2.npy,0\n" * 5)
    run(tmp_path / "job.py", tmp_path / "same", f"data.train={tmp_path / 'train.csv'}")
    mixed, same = (json.loads((tmp_path / n / "run.json").read_text())["forecast"] for n in ("run", "same"))
    assert mixed["shapes"] == same["shapes"] == [[1, 3, 160, 160]] and mixed["peak_bytes"] == same["peak_bytes"]
    assert mixed["step_s"] == pytest.approx(same["step_s"] * sum(s * s for s in SIDES) / (5 * 160 * 160))


def test_a_slide_that_cannot_be_opened_is_found_before_the_first_step(tmp_path: Path) -> None:
    write_tables(tmp_path, train="0=0 1=1 2=0 3=1 4=0")
    for number in range(5):  # whichever comes first in the order of the first epoch
        whole = (tmp_path / f"{number}.npy").read_bytes()
        (tmp_path / f"{number}.npy").write_bytes(b"nothing")
        with pytest.raises(DataError, match=rf"line {number + 2}: .*data\.on_bad=skip"):
            run(tmp_path / "job.py", tmp_path / "run", f"data.train={tmp_path / 'train.csv'}")
        (tmp_path / f"{number}.npy").write_bytes(whole)
        assert not (tmp_path / "run").exists()


def test_a_validation_without_one_of_the_classes_counts_the_others_as_training_does(tmp_path: Path) -> None:
    write_tables(tmp_path, train="0=a 1=b 2=c", held="3=b 4=c", other="3=b 4=d", numbers="3=1 4=2", values="3=0.5 4=1")
    assert tables_of(tmp_path, "held.csv")[1] == [("3", 1), ("4", 2)]
    with pytest.raises(DataError, match=r"other\.csv, line 3: label 'd' is none of a, b, c"):
        tables_of(tmp_path, "other.csv")
    with pytest.raises(DataError, match=r"numbers\.csv, line 2: label '1' is none of a, b, c"):
        tables_of(tmp_path, "numbers.csv")


@pytest.mark.parametrize(("train", "held"), [("0=0 1=1", "2=a 3=b"), ("0=0 1=1", "2=0.5 3=1"), ("0=0.5 1=1.5", "2=0")])
def test_labels_of_another_kind_are_refused(tmp_path: Path, train: str, held: str) -> None:
    write_tables(tmp_path, train=train, held=held)
    with pytest.raises(DataError, match=r"labels of .*train\.csv are .*, those of .*held\.csv .*; write them alike"):
        tables_of(tmp_path, "held.csv")


def test_a_slide_of_two_classes_is_refused(tmp_path: Path) -> None:
    write_tables(tmp_path, train="0=a 1=b 0=b")
    with pytest.raises(DataError, match=r"line 4: .*0\.npy has the label 'b', and 'a' in line 2; correct one of them"):
        tables_of(tmp_path, 0.5)


def test_the_lines_of_one_slide_are_on_one_side(tmp_path: Path) -> None:
    write_tables(tmp_path, train="0=0 1=1 2=0 3=1 0=0 1=1 2=0 3=1")
    train, held = tables_of(tmp_path, 0.25)
    assert {name for name, _ in train}.isdisjoint(name for name, _ in held) and len(train) + len(held) == 8
    write_tables(tmp_path, train="0=0 0=0 0=0 0=0")
    with pytest.raises(ConfigError, match="leaves nothing"):
        tables_of(tmp_path, 0.25)


def test_slides_that_are_trained_on_and_validated_on_are_counted(tmp_path: Path) -> None:
    write_tables(tmp_path, train="0=0 1=1 2=0", held="2=0 3=1")
    words = (f"data.train={tmp_path / 'train.csv'}", f"data.validation={tmp_path / 'held.csv'}")
    code, said = run(tmp_path / "job.py", tmp_path / "run", *words)
    assert code == 0 and "1 of the 2 slides of the validation is trained on too" in " ".join(said.split())
