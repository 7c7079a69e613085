"""Where in the user's code something was called, or went wrong.

A location is ``file:line`` with the file relative to the import path it was found on
(``torchvision/models/resnet.py:92``), so that it means the same on another machine.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from functools import cache
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
_HERE = str(Path(__file__).parent) + os.sep
_FILES: dict[str, str] = {}
"""Files that were named by a location -> where they are on this machine."""


def call_site(frame: FrameType | None = None) -> str:
    """Location of the innermost frame that is neither torch nor this package; empty if there is none."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if not _is_internal(frame.f_code.co_filename):
            return f"{_relative(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def definition(function: object) -> str:
    """Location of a function's first line; empty for builtins."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return f"{_relative(code.co_filename)}:{code.co_firstlineno}" if code else ""


def file_of(location: str) -> tuple[Path, int] | None:
    """The file and the line of a location that this process has given out; none for any other text."""
    name, _, line = location.rpartition(":")
    return (Path(_FILES[name]), int(line)) if name in _FILES and line.isdigit() else None


def blame(error: BaseException) -> str:
    """Location of the user's line that an exception came from; empty if none of the lines is the user's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_relative(error.filename)}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_internal(f.filename)]
    return f"{_relative(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


@cache
def _is_internal(filename: str) -> bool:
    own = filename == str(Path(_HERE).parent / "job.py") or filename.startswith((_TORCH, _HERE))
    return own or filename.startswith(("<frozen", "<string>")) or filename.endswith(("contextlib.py", "functools.py"))


def _relative(filename: str) -> str:
    name = _name_of(filename)
    _FILES[name] = filename  # of two files of one name the one that was used last
    return name


@cache
def _name_of(filename: str) -> str:
    roots = [p for p in map(os.path.abspath, sys.path) if filename.startswith(p + os.sep)]
    return os.path.relpath(filename, max(roots, key=len)) if roots else Path(filename).name
