"""What a command prints, on terminals that cannot show every character.

Under a C locale, in a container without one, or with `PYTHONIOENCODING=ascii`, a stream refuses "µs" and "█" with an
exception in the middle of a table. `readable_streams` lets such a stream have the nearest characters that it knows;
where "…" becomes "..." the spaces before the next column are fewer, so that columns stay where they are.
A pipe may be closed and a disk full before all is printed: `finish_streams` ends without a traceback of Python's own.
Python prints a warning with the file and the line of whoever was called, which for outcore's own is a line of torch:
`plain_warnings` prints those as sentences.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any

__all__ = ["finish_streams", "plain_warnings", "readable_streams"]

_OWN = "outcore"

_NEAREST = {
    "µ": "u", "█": "#", "▉": "#", "▊": "#", "▋": "#", "▌": "#", "▍": "#", "▎": "#", "▏": "#", "━": "-", "─": "-",
    "│": "|", "╸": "-", "╺": "-", "…": "...", "·": "-", "×": "x", "→": "->", "≤": "<=", "≥": ">=", "–": "-", "’": "'",
    "•": "*", "✓": "ok", "✗": "x", "├": "|", "└": "`", "┌": "+", "┐": "+", "┘": "+", "┴": "+", "┬": "+", "┼": "+",
    "╭": "+", "╮": "+", "╯": "+", "╰": "+", "┤": "|",
}  # fmt: skip
_SHORT = {"…": ".", "→": ">", "✓": "v"}
"""Of one column, for cells that have no room."""


def readable_streams() -> None:
    """Let standard output and standard error replace what their encoding does not have."""
    codecs.register_error("outcore.nearest", _nearest)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # not a text file, or closed
            if not codecs.lookup(stream.encoding or "utf-8").name.startswith("utf"):
                stream.reconfigure(errors="outcore.nearest")  # type: ignore[union-attr]


def plain_warnings() -> None:
    """Print outcore's own warnings without the place they came from; others as they are."""
    usual = warnings.showwarning

    def show(message: Warning | str, *place: Any, **options: Any) -> None:
        text = str(message)
        if text.startswith(_OWN):
            print(f"warning: {text.removeprefix(f'{_OWN}: ')}", file=sys.stderr)
        else:
            usual(message, *place, **options)

    warnings.showwarning = show


def finish_streams() -> None:
    """Write out what is left; a stream that takes no more is let go, else Python complains of it while it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())


def _nearest(error: UnicodeError) -> tuple[str, int]:
    """The rest of the line in characters that the encoding has, its columns where they were."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    end = error.object.find("\n", error.start)
    end = len(error.object) if end < 0 else end
    found, longer = "", 0
    parts = re.split("( {2,})", error.object[error.start : end])
    for part, after in zip(parts[::2], [*parts[1::2], None], strict=True):
        text, more = _written(part, error.encoding, _NEAREST)
        if after and longer + more > len(after) - 1:  # the spaces before the next column are too few
            text, more = _written(part, error.encoding, _NEAREST | _SHORT)
        longer += more
        left = max(1, len(after) - longer) if after else 0
        longer -= len(after or "") - left
        found += text + " " * left
    return found, end


def _written(text: str, encoding: str, nearest: Mapping[str, str]) -> tuple[str, int]:
    """A text in characters that an encoding has, and how many more columns it takes."""
    from rich.cells import cell_len

    found, more = "", 0
    for character in text:
        known = _known(character, encoding, nearest)
        more += 0 if known == character else len(known) - cell_len(character)
        found += known
    return found, more


def _known(character: str, encoding: str, nearest: Mapping[str, str]) -> str:
    try:
        character.encode(encoding)
    except UnicodeEncodeError:
        return nearest.get(character, "?")
    return character
