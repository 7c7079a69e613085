"""Documents are written whole or not at all; YAML cannot be made endless by aliases."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from outcore.documents.reading import read_yaml, write_text
from outcore.documents.schema import ListOf, MapOf, Whole
from outcore.errors import OutcoreError


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    write_text(target, "old, and longer than what follows")
    write_text(target, "né")
    assert target.read_bytes() == "né".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_link_stays_a_link_to_what_is_written(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "latest.json").symlink_to(there / "plan.json")
    (there / "plan.json").write_text("old")
    write_text(tmp_path / "latest.json", "new")
    assert (tmp_path / "latest.json").is_symlink()
    assert (there / "plan.json").read_text() == "new"
    assert [path.name for path in there.iterdir()] == ["plan.json"]


def test_a_pipe_is_written_into_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through")
    reader.join()
    assert read == ["through"]
    assert pipe.is_fifo()


def test_what_cannot_be_written_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutcoreError, match=r"no/plan.json cannot be written: No such file or directory; name another"):
        write_text(tmp_path / "no" / "plan.json", "text")
    (tmp_path / "taken").mkdir()
    with pytest.raises(OutcoreError, match="taken cannot be written: Is a directory"):
        write_text(tmp_path / "taken", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_aliases_of_yaml_may_be_used_but_not_to_build_a_document_without_end(tmp_path: Path) -> None:
    schema = MapOf(ListOf(Whole()))
    used = tmp_path / "used.yaml"
    used.write_text("a: &a [1, 2]\nb: *a\n")
    assert read_yaml(used, schema, OutcoreError) == {"a": [1, 2], "b": [1, 2]}
    bomb = tmp_path / "bomb.yaml"
    rows = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    bomb.write_text("\n".join(rows))
    endless = tmp_path / "endless.yaml"
    endless.write_text("a: &a [1, *a]\n")
    for path in (bomb, endless):
        with pytest.raises(OutcoreError, match=r"holds more than [\d,]+ values with its aliases written out"):
            read_yaml(path, schema, OutcoreError)


def test_as_many_values_as_a_document_may_hold_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each list, each object, each key and each number is one."""
    monkeypatch.setattr("outcore.documents.reading._MOST_NODES", 8)
    (tmp_path / "eight.yaml").write_text("a: [1, 2]\nb: [3]\n")
    assert read_yaml(tmp_path / "eight.yaml", MapOf(ListOf(Whole())), OutcoreError) == {"a": [1, 2], "b": [3]}
    (tmp_path / "nine.yaml").write_text("a: [1, 2]\nb: [3, 4]\n")
    with pytest.raises(OutcoreError, match="holds more than 8 values"):
        read_yaml(tmp_path / "nine.yaml", MapOf(ListOf(Whole())), OutcoreError)
