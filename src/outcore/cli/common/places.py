"""Where a command may write: looked at before it works.

A folder where a file belongs, a folder that takes no files, a file that the command reads itself, two results of one
name: each is a sentence before anything begins, instead of an error, or a destroyed job, after minutes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from outcore.errors import OutcoreError

__all__ = ["check_files", "check_folder"]

_FILES = {
    "svg": "--svg",
    "html": "--html",
    "page": "--page",
    "trace": "--trace",
    "export": "--export",
    "output": "--output",
}
"""Parameters that name a file to write, with their options."""
_READ = ("job", "plan_file", "stages", "on", "machine", "name", "against", "shade")
"""Parameters that may name a file to read."""


def check_files(given: Mapping[str, Any]) -> None:
    """Refuse files that cannot be written, that the command reads, or that two options name."""
    written = {option: Path(given[name]) for name, option in _FILES.items() if given.get(name) is not None}
    for option, path in written.items():
        _check_file(path)
        for source in _read(given):
            if _same(path, source):
                raise OutcoreError(f"{option} {path} would destroy {source}, which is read; name another file")
        if path.suffix == ".py" and path.exists():
            raise OutcoreError(f"{option} {path} would destroy a Python file; name another file")
        run = given.get("run")
        if run is not None and path.resolve().parent == Path(run).resolve() and path.exists() and not _is_page(path):
            raise OutcoreError(f"{option} {path} would destroy a part of the run; name another file, or none")
    for (one, first), (other, second) in combinations(written.items(), 2):
        stream = first.exists() and not first.is_file()  # /dev/stdout, a pipe
        if not stream and (first.resolve() == second.resolve() or _same(first, second)):
            raise OutcoreError(f"{one} and {other} name the same file, {first}; name two")


def check_folder(path: Path, option: str) -> None:
    """Refuse a folder that could not be made."""
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not os.access(there, os.W_OK):
        said = f"{path} cannot be written: {there} takes no files of yours"
        raise OutcoreError(f"{said}; name another place: {option} {Path.home() / path.name}")


def _check_file(path: Path) -> None:
    """Refuse a file that could not be written."""
    if path.is_dir():
        raise OutcoreError(f"{path} is a folder; give the name of a file: {path / 'NAME'}")
    if not path.parent.is_dir():
        raise OutcoreError(f"no folder {path.parent} for {path.name}; make it first: mkdir -p {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutcoreError(f"{path} cannot be written: {path.parent.resolve()} takes no files of yours; name another")


def _read(given: Mapping[str, Any]) -> Iterator[Path]:
    """The files that a command was given to read."""
    for name in _READ:
        if given.get(name) is not None:
            with contextlib.suppress(OSError, ValueError):  # a name that no file can have
                if (path := Path(given[name])).is_file():
                    yield path


def _is_page(path: Path) -> bool:
    return path.suffix in (".html", ".htm")


def _same(one: Path, two: Path) -> bool:
    """Whether two names are one file that exists."""
    with contextlib.suppress(OSError, ValueError):
        return one.samefile(two)
    return False
