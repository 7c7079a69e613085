"""Outputs that are not there until they are complete.

A map of a slide takes minutes to hours to compute. If it were written under its own name, an interruption would leave
a file that looks finished, and a second run would empty what the first had made. So everything is written into a
folder beside the output, and renamed when it is done:

    .mask.tif.partial/    lock, about.json, map.npy, done.jsonl, and what is made of them

`about.json` says what the work is for (slide, weights, tiles). The same command finds the folder again: if it is for
the same work it goes on from there, else the folder is emptied. A lock held by the process, which the system lets go
of when the process dies in any way, keeps a second one out.

Invariants: nothing that exists is replaced unless asked, a folder only if it is a Zarr and a Zarr takes its place, and
what is read from (slide, weights, job) never.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outcore.data.opening import is_zarr
from outcore.errors import DataError, FullDiskError, OutcoreError

__all__ = ["Partial", "check_free", "check_not_read", "full_disk_named"]


@contextlib.contextmanager
def full_disk_named() -> Iterator[None]:
    """A full disk in one sentence. What was written stays: this is outside of what removes it after a refusal."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise FullDiskError(
            "the disk of the output is full; make room and run the same command again, which goes on from what was "
            "written, or say another -o"
        ) from error


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise for an output that exists, or whose folder does not.

    Raises:
        DataError: says what is there and what to type.
    """
    if not path.parent.is_dir():
        raise DataError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    if not os.path.lexists(path):
        return
    if path.is_dir() and not path.is_symlink() and not (path.suffix.lower() == ".zarr" and is_zarr(path)):
        raise DataError(f"{path} is a folder, and is not replaced; say another -o")
    if not overwrite:
        raise DataError(f"{path} exists; say another -o, or --overwrite to replace it")


def check_not_read(path: Path, read: Iterable[Path]) -> None:
    """Raise for an output that is one of the inputs, lies inside of one, or has one inside of it."""
    place = path.resolve()
    for given in read:
        source = given.resolve()
        inside = is_zarr(source) and source in place.parents
        if place == source or inside or place in source.parents or _same(path, given):
            raise DataError(f"-o {path} would destroy {given}, which is read; say another -o")


def _same(one: Path, two: Path) -> bool:
    """Whether two names are one file (a hard link)."""
    with contextlib.suppress(OSError):
        return one.samefile(two)
    return False


class Partial:
    """The folder of an output in the making; use it in a ``with`` statement.

    Left because of a refusal (`OutcoreError`) the folder is removed: the same would happen again. Left for any other
    reason it stays, for the next run of the same command.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output.with_name(f".{output.name}.partial")
        self._lock: int | None = None

    def __enter__(self) -> Self:
        import fcntl

        self.folder.mkdir(exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._release()
            raise DataError(
                f"{self.output} is being written by another process; wait for it, or say another -o"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or isinstance(error, OutcoreError):
            shutil.rmtree(self.folder, ignore_errors=True)
        self._release()

    def begin(self, about: Mapping[str, Any]) -> bool:
        """Record what the work is for; returns whether an earlier run left work for the same."""
        said = json.dumps(about, sort_keys=True)
        file = self.folder / "about.json"
        if file.is_file() and file.read_text(errors="replace", encoding="utf-8") == said:
            return True
        self.clear()
        aside = file.with_suffix(".new")
        aside.write_text(said, encoding="utf-8")
        aside.replace(file)
        return False

    def clear(self) -> None:
        """Remove what an earlier run has left, except the lock."""
        for entry in self.folder.iterdir():
            if entry.name == "lock":
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def publish(self, made: Path, output: Path) -> None:
        """Give a finished file or folder its name; what was there before goes when the new one is in place."""
        if output.is_dir() and not output.is_symlink():
            old = self.folder / "replaced"
            output.replace(old)
            made.replace(output)
            shutil.rmtree(old, ignore_errors=True)
        else:
            made.replace(output)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
