"""A table of slides: labels of every kind, and what is wrong with it named by line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from outcore.data import DataError, SlideTable, read_folder, read_table


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        np.save(tmp_path / f"{name}.npy", np.zeros((3, 8, 8), np.uint8))
    np.save(tmp_path / "small.npy", np.zeros((1, 4, 4), np.uint8))
    return tmp_path


def table(folder: Path, text: str) -> Path:
    (folder / "t.csv").write_text(text)
    return folder / "t.csv"


@pytest.mark.parametrize(
    ("labels", "numbers", "classes"),
    [
        (("0", "2", "1"), [0, 2, 1], ()),
        (("tall", "classic", "tall"), [1, 0, 1], ("classic", "tall")),
        (("0.5", "1", "-2.5"), [0.5, 1.0, -2.5], ()),
    ],
)
def test_labels(folder: Path, labels: tuple[str, ...], numbers: list[float], classes: tuple[str, ...]) -> None:
    rows = "".join(f"{name}.npy,{label}\n" for name, label in zip("abc", labels, strict=True))
    read = read_table(table(folder, f"path,label\n{rows}"))
    assert [row.label for row in read.rows] == numbers and read.classes == classes
    assert read[1].image.shape == (3, 8, 8) and read[1].label == numbers[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("file,label\na.npy,0\n", "columns file, label; needed are path"),
        ("path,label\n", "names no slide; below its columns write a line for each"),
        ("path,label\na.npy,0\nb.npy,\n", "line 3: the label is empty"),
        ("path,label\na.npy,0\nb.npy,-1\n", "line 3: label -1 is negative"),
        ("path,label\na.npy,tall\nb.npy,1\n", "line 3: label '1' is a number, others are words"),
        ("path,label\na.npy,0\nd.npy,1\n", "line 3: no file .*; paths are relative to the table"),
    ],
)
def test_what_is_wrong_is_named_by_line(folder: Path, text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_table(table(folder, text))


def test_a_label_outside_the_given_classes(folder: Path) -> None:
    with pytest.raises(DataError, match="line 3: label 'tal' is none of classic, tall"):
        read_table(table(folder, "path,label\na.npy,tall\nb.npy,tal\n"), classes=("classic", "tall"))


def test_a_mask_of_another_size_is_refused(folder: Path) -> None:
    read = read_table(table(folder, "path,mask\na.npy,small.npy\n"))
    with pytest.raises(DataError, match=r"line 2: the mask .*small\.npy has \(4, 4\)"):
        read[0]


def test_bad_slides_stop_the_run_or_are_skipped_and_listed(folder: Path) -> None:
    (folder / "b.npy").write_text("not an array")
    path = table(folder, "path,label\na.npy,0\nb.npy,1\nc.npy,0\n")
    with pytest.raises(DataError, match=r"line 3: .*b\.npy.*on_bad=skip"):
        list(read_table(path).examples())
    skipping = read_table(path, on_bad="skip")
    for _ in range(2):
        assert [example.row.path.stem for example in skipping.examples([2, 1, 0])] == ["c", "a"]
    assert [bad.path.name for bad in skipping.bad] == ["b.npy"]


def test_a_missing_package_is_said_and_never_taken_for_a_bad_slide(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "d.png").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    skipping = read_table(table(folder, "path,label\na.npy,0\nd.png,1\n"), on_bad="skip")
    with pytest.raises(DataError, match=r"d\.png needs Pillow; install it with: pip install 'outcore\[slides\]'$"):
        list(skipping.examples())
    assert not skipping.bad


@pytest.mark.parametrize("wrong", [{"on_bad": "ignore"}, {"on_bad": "skip", "on_damage": "wite"}])
@pytest.mark.parametrize("read", [read_table, read_folder])
def test_a_choice_that_does_not_exist_is_refused_and_skips_no_slide(
    tmp_path: Path, read: Callable[..., SlideTable], wrong: dict[str, str]
) -> None:
    (tmp_path / "ants").mkdir()
    np.save(tmp_path / "ants" / "a.npy", np.zeros((8, 8, 3), np.uint8))
    place = tmp_path if read is read_folder else table(tmp_path, "path,label\nants/a.npy,0\n")
    with pytest.raises(DataError, match=f"{list(wrong)[-1]}='.*' is not known"):
        read(place, **wrong)
