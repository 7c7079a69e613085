"""The text of a table, as spreadsheets write it.

Spreadsheets write CSV as UTF-8 with or without a mark at its beginning, as UTF-16 with tabs ("Unicode text"), with
semicolons where the comma is the decimal sign, and on some systems in an encoding of the country. The first three are
read. The last cannot be distinguished from other encodings, and a wrong guess would change the names of files and
classes silently, so it is an error.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Sequence
from pathlib import Path

from outcore.errors import DataError
from outcore.machine.units import counted, format_bytes

_LARGEST_BYTES = 256 << 20
"""A table of a million slides takes less."""
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_SEPARATORS = ",;\t"


def read_rows(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """The columns of a table, and its rows, each with the number of its line; rows without a path are left out.

    Raises:
        DataError: it is no file, too large, not text, or not a table.
    """
    if not path.is_file():
        what = "no table" if not path.exists() else "not a file:"
        raise DataError(f"{what} {path}; write a CSV file with columns path and label")
    if (size := path.stat().st_size) > _LARGEST_BYTES:
        raise DataError(f"{path} has {format_bytes(size)}; a table has at most {format_bytes(_LARGEST_BYTES)}")
    text = _text(path, path.read_bytes())
    first = text.split("\n", 1)[0]
    separator = max(_SEPARATORS, key=first.count)
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        columns = [(name or "").strip() for name in reader.fieldnames or []]
        reader.fieldnames = columns
        rows = [(reader.line_num, {k: v or "" for k, v in row.items() if k is not None}) for row in reader]
    except csv.Error as error:
        raise DataError(f"{path} is not a table: {error}; save it as CSV again") from None
    if twice := sorted({c for c in columns if c and columns.count(c) > 1}):
        raise DataError(f"{path} has the column {twice[0][:60]} {columns.count(twice[0])} times; one is needed")
    return columns, [(number, row) for number, row in rows if row.get("path", "").strip()]


def listed(columns: Sequence[str]) -> str:
    """Columns by name, for a message: of what is no table one may have a million characters.

    >>> listed(["slide", "grade"]), listed([]), listed("abcdefghij")
    ('slide, grade', 'none', 'a, b, c, d, e, f, g and 3 others')
    """
    most = 7
    names = ", ".join(name if len(name) <= 30 else f"{name[:29]}…" for name in columns[:most])
    others = len(columns) - most
    return (names or "none") + (f" and {counted(others, 'other')}" if others > 0 else "")


def _text(path: Path, data: bytes) -> str:
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        byte = data[error.start]
        raise DataError(
            f"{path} is not UTF-8 text (byte 0x{byte:02x} in line {line}); save it as 'CSV UTF-8' in the spreadsheet"
        ) from None
    if "\0" in text:
        raise DataError(f"{path} holds zero bytes, so it is not text; save it as 'CSV UTF-8' in the spreadsheet")
    return text
