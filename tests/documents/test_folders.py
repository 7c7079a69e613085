"""Folders that were made for nothing are removed; those that were there, or hold something, stay."""

from __future__ import annotations

from pathlib import Path

from outcore.documents.folders import missing_folders, remove_empty


def test_what_was_made_and_is_empty_is_removed(tmp_path: Path) -> None:
    wanted = tmp_path / "runs/first"
    made = missing_folders(wanted)
    assert made == [wanted, tmp_path / "runs"]
    wanted.mkdir(parents=True)
    assert missing_folders(wanted) == []
    remove_empty(made)
    assert tmp_path.exists() and not (tmp_path / "runs").exists()


def test_what_holds_something_stays(tmp_path: Path) -> None:
    made = missing_folders(tmp_path / "runs/first")
    (tmp_path / "runs/first").mkdir(parents=True)
    (tmp_path / "runs/notes.txt").touch()
    remove_empty([*made, tmp_path / "never"])
    assert not (tmp_path / "runs/first").exists() and (tmp_path / "runs/notes.txt").exists()
