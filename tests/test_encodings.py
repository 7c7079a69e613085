"""Text files are UTF-8 whatever the locale of the process is: every place that reads or writes one says so.

Python takes the locale's encoding where none is named. Under a C locale a page with "µs" in it could not be written,
and a table of slides with an accent in a name could not be read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import outcore

SOURCE = Path(outcore.__file__).parent
TEXT_MODES = {"r", "w", "a", "x", "r+", "w+", "a+", "rt", "wt", "at"}


def silent_places(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that read or write text without an encoding."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(k.arg == "encoding" for k in node.keywords):
            continue
        match node.func:
            case ast.Attribute(attr="read_text" | "write_text" as name):
                yield node.lineno, name
            case ast.Name(id="open") | ast.Attribute(attr="fdopen"):
                modes = node.args[1:2] or [ast.Constant("r")]
                if isinstance(modes[0], ast.Constant) and modes[0].value in TEXT_MODES:
                    yield node.lineno, "open"
            case ast.Attribute(attr="open"):
                if node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value in TEXT_MODES:
                    yield node.lineno, "open"


def test_every_text_file_says_its_encoding() -> None:
    silent = [
        f"{path.relative_to(SOURCE)}:{line} {name}"
        for path in SOURCE.rglob("*.py")
        if re.search(r"(_text|open)\(", content := path.read_text(encoding="utf-8"))
        for line, name in silent_places(ast.parse(content))
    ]
    assert silent == []


def test_what_is_looked_for_is_found() -> None:
    written = 'a.read_text()\nb.write_text(x)\nopen(p)\nopen(p, "w")\nc.open("a", newline="")\nos.fdopen(n, "w")\n'
    said = 'a.read_text(encoding="utf-8")\nopen(p, "rb")\nslide.open(path)\nc.open("wb")\n'
    assert [line for line, _ in silent_places(ast.parse(written))] == [1, 2, 3, 4, 5, 6]
    assert list(silent_places(ast.parse(said))) == []
