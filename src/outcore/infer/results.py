"""Many slides into one folder: a table of results that grows, and goes on where it stopped.

    results/results.csv     a row for each slide that is done
            failed.csv      slides that could not be run, and why
            infer.json      what the results depend on: weights, model, settings
            NAME.mask.tif, NAME.heat.tif, NAME.overlay.png

A row is appended when all files of its slide are there. The same command again leaves out the slides that have one,
tries those again that failed, and goes on inside the slide it was in. Results of other weights or settings are never
mixed in: the folder is refused.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outcore.errors import DataError
from outcore.infer.partial import full_disk_named
from outcore.infer.slides import SlideInput

__all__ = ["ResultsFolder", "result_row"]

_ABOUT = "infer.json"


def result_row(slide: SlideInput, row: Mapping[str, Any]) -> dict[str, Any]:
    """The results of a slide, a column for each number.

    >>> slide = SlideInput(Path("a.tif"), "a.tif", "a", "tall")
    >>> row = {"class": 1, "name": "tall", "names": ["low", "tall"], "scores": [0, 2], "probabilities": [0.1, 0.9]}
    >>> ",".join(result_row(slide, row))
    'path,label,class,name,score_low,score_tall,probability_low,probability_tall,damaged_tiles,time_s'
    """
    found: dict[str, Any] = {"path": slide.given, "label": slide.label}
    found |= {name: row[name] for name in ("class", "name") if name in row}
    for kind, one in (("scores", "score"), ("probabilities", "probability"), ("shares", "share")):
        found |= {f"{one}_{name}": value for name, value in zip(row["names"], row.get(kind) or (), strict=False)}
    found |= {name: Path(row[name]).name for name in ("output", "heat", "overlay") if name in row}
    return found | {"damaged_tiles": row.get("damaged_tiles", 0), "time_s": round(row.get("time_s", 0.0), 3)}


@dataclass
class ResultsFolder:
    """The folder that the results of several slides go to; use it in a ``with`` statement."""

    path: Path
    about: Mapping[str, Any]
    overwrite: bool = False

    def __enter__(self) -> Self:
        self._check()
        self.path.mkdir(exist_ok=True)
        self._hold()
        try:
            if self.overwrite:
                for name in (_ABOUT, "results.csv", "failed.csv"):
                    (self.path / name).unlink(missing_ok=True)
            replace_text(self.path / _ABOUT, json.dumps(self.about, indent=1) + "\n")
            self.done, self.columns = self._read()
            (self.path / "failed.csv").unlink(missing_ok=True)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)
        (self.path / ".lock").unlink(missing_ok=True)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append the row of a slide."""
        columns = list(row)
        if self.columns and columns != self.columns:
            # A network whose number of outputs depends on the slide, or a picture that one of them has no use for.
            columns = self.columns
        new = not self.columns
        self.columns = columns
        with full_disk_named(), (self.path / "results.csv").open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore", restval="", lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)
        self.done.add(str(row["path"]))

    def fail(self, slide: SlideInput, reason: str) -> None:
        """List a slide that could not be run."""
        file_path = self.path / "failed.csv"
        new = not file_path.exists()
        with full_disk_named(), file_path.open("a", newline="", encoding="utf-8", errors="surrogateescape") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([*([["path", "reason"]] if new else []), [slide.given, reason]])

    def left(self, slides: Sequence[SlideInput]) -> Iterator[SlideInput]:
        """Slides without a row."""
        return (slide for slide in slides if slide.given not in self.done)

    def _check(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise DataError(f"-o {self.path} is a file; the results of several slides go to a folder")
        if not self.path.parent.is_dir():
            raise DataError(f"-o {self.path}: there is no folder {self.path.parent}; make it first")
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return
        file = self.path / _ABOUT
        if not file.is_file():
            raise DataError(f"{self.path} is a folder with other files in it; say another -o")
        with contextlib.suppress(ValueError, OSError):
            if self.overwrite or json.loads(file.read_text(encoding="utf-8")) == json.loads(json.dumps(self.about)):
                return
        raise DataError(
            f"{self.path} holds the results of other weights or settings; say another -o, or --overwrite to begin anew"
        )

    def _hold(self) -> None:
        """Lock the folder against other processes, until this one ends."""
        import fcntl

        self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise DataError(
                f"{self.path} is being written by another process; wait for it, or say another -o"
            ) from None

    def _read(self) -> tuple[set[str], list[str]]:
        """The paths of the rows that are there, and the columns; a row that was cut off is taken out."""
        file = self.path / "results.csv"
        if not file.is_file():
            return set(), []
        text = file.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            replace_text(file, whole.decode(errors="surrogateescape"))
        try:
            rows = list(csv.DictReader(whole.decode(errors="surrogateescape").splitlines(keepends=True), strict=True))
        except csv.Error as error:
            raise DataError(f"{file} is damaged: {error}; say another -o, or --overwrite to begin anew") from None
        return {row["path"] for row in rows if row.get("path")}, list(rows[0]) if rows else []


def replace_text(path: Path, text: str) -> None:
    """Write a file aside and rename it."""
    aside = path.with_name(f".{path.name}.new")
    try:
        with full_disk_named():
            aside.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
            aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
