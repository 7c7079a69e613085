"""Tables as spreadsheets write them: read, or refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from outcore.data import DataError, read_table
from outcore.data.table_file import read_rows

TEXT = "path,label\na.npy,gr\u00fcn\nb.npy,rot\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.zeros((3, 8, 8), np.uint8))
    return tmp_path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_what_spreadsheets_write_is_read(folder: Path, encoding: str, separator: str, ending: str) -> None:
    text = TEXT.replace(",", separator).replace("\n", ending)
    (folder / "t.csv").write_bytes(text.encode(encoding))
    table = read_table(folder / "t.csv")
    assert table.classes == ("gr\u00fcn", "rot") and [row.label for row in table.rows] == [0, 1]
    assert [row.number for row in table.rows] == [2, 3]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (TEXT.encode("latin-1"), r"is not UTF-8 text \(byte 0xfc in line 2\); save it as 'CSV UTF-8'"),
        (TEXT.encode("utf-16-le"), "save it as 'CSV UTF-8'"),
        (b"\xff\xfe\x00", "is not UTF-8 text|save it as"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is not UTF-8 text"),
        (b'path,label\n"a.npy,0\n', "is not a table: unexpected end of data"),
        (b"path,path\na.npy,b.npy\n", "has the column path 2 times"),
        (b"path,label\n" + b"x" * 200_000 + b",0\n", "is not a table: field larger"),
        (b"", "has columns none"),
        (b"path,label\na.npy,nan\nb.npy,1\n", "line 2: label nan is not a finite number"),
        (b"path,label\na.npy,99999999999999999999\nb.npy,1\n", "is above 1,000,000"),
        (b"path,label\n" + b"n" * 5000 + b".npy,0\n", "line 2: no file"),
    ],
)
def test_what_is_no_table_is_refused_in_a_sentence(folder: Path, data: bytes, said: str) -> None:
    (folder / "t.csv").write_bytes(data)
    with pytest.raises(DataError, match=said):
        read_table(folder / "t.csv")


def test_rows_are_numbered_by_the_line_they_end_in(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('path,label\n"a\nb.npy",0\n\n,\nc.npy,1\n')
    columns, rows = read_rows(tmp_path / "t.csv")
    assert columns == ["path", "label"] and [number for number, _ in rows] == [3, 6]


def test_what_is_no_table_is_named_by_few_characters(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    for content in ("[" * 100_000, "," * 50_000 + "a", "x,x," + "y" * 90_000, '"' + "z" * 90_000):
        path.write_text(content)
        with pytest.raises(DataError) as refused:
            read_table(path)
        assert len(str(refused.value)) < len(str(path)) + 300, content[:9]
