"""Keeps a library's own printing off the terminal.

HiGHS prints a line of its internals now and then, from C and whatever its options say. While it runs, the process's
standard output is redirected to nothing; what C still holds in its buffer is flushed before and after, so that lines of
others are neither lost nor let through late. What another thread prints meanwhile is lost.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["quiet"]

_STDOUT = 1


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which nothing is written to the process's standard output."""
    try:
        kept = os.dup(_STDOUT)
    except OSError:  # there is none
        yield
        return
    _flush()
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, _STDOUT)
        yield
    finally:
        _flush()
        os.dup2(kept, _STDOUT)
        os.close(nothing)
        os.close(kept)


def _flush() -> None:
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    with suppress(OSError, TypeError, AttributeError):  # no such library outside of Unix
        ctypes.CDLL(None).fflush(None)
