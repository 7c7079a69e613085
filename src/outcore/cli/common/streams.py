"""What a command prints, on terminals that cannot show every character.

Under a C locale, in a container without one, or with `PYTHONIOENCODING=ascii`, a stream refuses "µs" and "█" with an
exception in the middle of a table. `readable_streams` lets such a stream have the nearest characters that it knows.
A pipe may be closed and a disk full before all is printed: `finish_streams` ends without a traceback of Python's own.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys

__all__ = ["finish_streams", "readable_streams"]

_NEAREST = {
    "µ": "u", "█": "#", "▉": "#", "▊": "#", "▋": "#", "▌": "#", "▍": "#", "▎": "#", "▏": "#", "━": "-", "─": "-",
    "│": "|", "╸": "-", "╺": "-", "…": "...", "·": "-", "×": "x", "→": "->", "≤": "<=", "≥": ">=", "–": "-", "’": "'",
    "•": "*", "✓": "ok", "✗": "x", "├": "|", "└": "`", "┌": "+", "┐": "+", "┘": "+", "┴": "+", "┬": "+", "┼": "+",
    "╭": "+", "╮": "+", "╯": "+", "╰": "+", "┤": "|",
}  # fmt: skip


def readable_streams() -> None:
    """Let standard output and standard error replace what their encoding does not have."""
    codecs.register_error("outcore.nearest", _nearest)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # not a text file, or closed
            if not codecs.lookup(stream.encoding or "utf-8").name.startswith("utf"):
                stream.reconfigure(errors="outcore.nearest")  # type: ignore[union-attr]


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
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_NEAREST.get(character, "?") for character in missing), error.end
