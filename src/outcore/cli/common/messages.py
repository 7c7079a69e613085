"""What a command prints while it works: a spinner where it takes its time, and a line for every file it wrote.

Both go to standard error, so that what a command prints can be piped. Without a terminal there is no spinner.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

__all__ = ["Interruption", "table_console", "working", "wrote"]

_TABLE_WIDTH = 80


@contextlib.contextmanager
def working(what: str, *, quiet: bool = False) -> Iterator[None]:
    """A spinner with what is being done."""
    console = Console(stderr=True)
    with contextlib.nullcontext() if quiet or not console.is_terminal else console.status(what):
        yield


def table_console() -> Console:
    """Standard output, wide enough for every number of a table; a terminal that is narrower breaks its lines."""
    return Console(width=max(Console().width, _TABLE_WIDTH))


def wrote(*paths: Path | None) -> None:
    """Print which files were written."""
    for path in paths:
        if path is not None:
            Console(stderr=True).print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)


class Interruption:
    """Ctrl-C while kernels run: noted when it comes, raised where `check` is called.

    An exception that Python raises in the middle of a backward pass crosses C++ frames that do not expect it, and ends
    the process with an abort. A second Ctrl-C ends it at once.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if Ctrl-C was pressed."""
        if self.came:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            os._exit(130)
        self.came = True
