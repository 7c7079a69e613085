"""Folders that a command makes for its results, and removes again where it fails before there are any.

What was there before stays, and so does what holds something.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["missing_folders", "remove_empty"]


def missing_folders(path: Path) -> list[Path]:
    """A folder and those above it that are not there, the innermost first: those that making it would make.

    >>> missing_folders(Path("/"))
    []
    """
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of some folders, the innermost first, that hold nothing."""
    for folder in folders:
        with contextlib.suppress(OSError):  # it holds something, or is gone
            folder.rmdir()
