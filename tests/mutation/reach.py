"""Which quick test reaches which block of the source.

Every block (the body of a function, of a branch, of a loop) begins, in a run that is watched, with one more statement
that sets a byte in a file which all processes have in memory: those that a test forks or starts too. After each test
the bytes are read and cleared. A byte costs as little as an assignment, so tests take hardly longer than otherwise.
The statement is put into the syntax tree while a module is imported; files and line numbers stay as they are.

What is known of a few files of tests is kept until one of them changes, by the names of functions and the number of
the block in its function, so that it also serves when the source has changed elsewhere.
"""

from __future__ import annotations

import ast
import hashlib
import json
import mmap
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BUSY = 4.0
"""By so much a busy machine may stretch a test that waits for other processes."""
HOOK = '''"""Marks of the blocks that are reached, where the environment names a file for them."""
import os

if target := os.environ.get("MUTATION_MARKS"):
    import ast, builtins, importlib.machinery, json, marshal, mmap

    with open(target, "r+b") as file:
        builtins.__reached__ = mmap.mmap(file.fileno(), 0)
    with open(target + ".json") as file:
        begins = json.load(file)

    def get_code(self, name, plain=importlib.machinery.SourceFileLoader.get_code):
        path = self.get_filename(name)
        where = path.rpartition("/src/outcore/")[2]
        if where not in begins:
            return plain(self, name)
        cached = f"{target}.{where.replace('/', '.')}"
        if os.path.exists(cached):
            with open(cached, "rb") as file:
                return marshal.load(file)
        tree = ast.parse(self.get_data(path), path)
        first = begins[where]
        for node in ast.walk(tree):
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                if isinstance(block, list) and block and not isinstance(node, (ast.Module, ast.ClassDef)):
                    mark = ast.parse(f"__reached__[{first + block[0].lineno}] = 1").body[0]
                    for part in ast.walk(mark):
                        if hasattr(part, "lineno"):
                            part.lineno = part.end_lineno = block[0].lineno
                            part.col_offset = part.end_col_offset = block[0].col_offset
                    doc = isinstance(block[0], ast.Expr) and isinstance(getattr(block[0].value, "value", None), str)
                    block.insert(1 if doc else 0, mark)
        code = compile(tree, path, "exec", dont_inherit=True)
        with open(f"{cached}.{os.getpid()}", "wb") as file:
            marshal.dump(code, file)
        os.replace(f"{cached}.{os.getpid()}", cached)
        return code

    importlib.machinery.SourceFileLoader.get_code = get_code
'''


def blocks(source: str) -> Iterator[tuple[str, int, int, int]]:
    """Each block's name (`Class.function:2` is the function's third), its first line, its first and last byte."""
    counts: dict[str, int] = defaultdict(int)
    starts = [0]
    for row in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(row))

    def walk(node: ast.AST, function: str, inside: str) -> Iterator[tuple[str, int, int, int]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = inside + node.name
            inside = f"{name}." if isinstance(node, ast.ClassDef) else f"{name}.<locals>."
            function = function if isinstance(node, ast.ClassDef) else name
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block and function and not isinstance(node, ast.ClassDef):
                first, last = block[0], block[-1]
                begins, ends = (
                    starts[first.lineno - 1] + first.col_offset,
                    starts[last.end_lineno - 1] + last.end_col_offset,
                )
                yield f"{function}:{counts[function]}", first.lineno, begins, ends
                counts[function] += 1
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function, inside)

    yield from walk(ast.parse(source), "", "")


def block_at(source: str, place: int) -> str:
    """The name of the innermost block that holds a byte of the source; empty outside of functions."""
    holding = [(ends - begins, name) for name, _, begins, ends in blocks(source) if begins <= place < ends]
    return min(holding)[1] if holding else ""


def importers(source: Path, file: str) -> set[str]:
    """A file, the files that import it, and those that import these as far as they belong to the same package."""
    found, asked = {file}, [file]
    every = {str(path.relative_to(source)): path.read_text() for path in source.rglob("*.py")}
    while asked:
        parent, _, name = asked.pop().removesuffix(".py").replace("/", ".").rpartition(".")
        imported = re.compile(rf"from outcore\.{re.escape(parent)}(\.{name} import | import .*\b{name}\b)")
        more = {other for other, words in every.items() if other not in found and imported.search(words)}
        found |= more
        asked += [other for other in more if other.split("/")[0] == file.split("/")[0]]
    return found


class Marks:
    """The bytes of one process and of all that it starts, and which block each of them stands for."""

    def __init__(self, source: Path, target: Path) -> None:
        self.target = target
        begins, names, places, length = dict[str, int](), list[str](), list[int](), 0
        for path in sorted(source.rglob("*.py")):
            file, words = str(path.relative_to(source)), path.read_text()
            begins[file] = length
            for name, line, _, _ in blocks(words):
                names.append(f"{file}:{name}")
                places.append(length + line)
            length += words.count("\n") + 2
        self.names, self.places = np.array(names), np.array(places)
        target.parent.mkdir(parents=True, exist_ok=True)
        for old in target.parent.glob(target.name + ".*"):
            old.unlink()
        target.write_bytes(bytes(length))
        Path(f"{target}.json").write_text(json.dumps(begins))
        with target.open("r+b") as file:
            self.bytes = mmap.mmap(file.fileno(), 0)

    def take(self) -> Any:
        """What was reached since the last time, block by block."""
        reached: Any = np.frombuffer(bytes(self.bytes), np.uint8)[self.places] > 0
        self.bytes[:] = bytes(len(self.bytes))
        return reached


class Watch:
    """A plugin of pytest that writes down what each test reached, how long it took, and whether it passed."""

    def __init__(self, marks: Marks, stored: dict[str, Path], file_s: float) -> None:
        self.marks, self.stored, self.file_s = marks, stored, file_s
        self.spent: dict[str, float] = defaultdict(float)
        self.rows: list[tuple[str, float, Any]] = []
        self.shared: dict[str, Any] = {}
        """By file, what was reached on behalf of all of its tests: by fixtures of a wider scope, through caches."""
        self.began, self.worked, self.good, self.reached = 0.0, 0.0, True, marks.take()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.reached = self.marks.take() & False
        self.began, self.worked, self.good = time.monotonic(), time.process_time(), True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        if self.spent[item.nodeid.partition("::")[0]] > self.file_s:
            pytest.skip("its file has had its time")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[Any]:
        if fixturedef.scope == "function":
            return (yield)
        self.reached |= self.marks.take()
        done = yield
        made = self.marks.take()
        self.reached |= made
        file = request.node.nodeid.partition("::")[0]
        self.shared[file] = self.shared.get(file, made) | made
        return done

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.good = self.good and report.passed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.reached |= self.marks.take()
        file = nodeid.partition("::")[0]
        self.spent[file] += time.process_time() - self.worked
        if self.good:
            took = max(time.process_time() - self.worked, (time.monotonic() - self.began) / BUSY)
            self.rows.append((nodeid, took, self.reached | self.shared.get(file, False)))
        if "cache" in Path(file).read_text():
            self.shared[file] = self.shared.get(file, False) | self.reached

    def pytest_sessionfinish(self) -> None:
        for file, stored in self.stored.items():
            store(stored, [row for row in self.rows if row[0].startswith(f"{file}::")], self.marks.names)


def store(target: Path, rows: list[tuple[str, float, Any]], names: Any) -> None:
    """Keep what the tests of a file reach."""
    reached = np.array([row[2] for row in rows]) if rows else np.zeros((0, len(names)), bool)
    some = reached.any(axis=0)
    aside = target.with_name(f"{os.getpid()}.npz")
    np.savez_compressed(
        aside,
        tests=np.array([row[0] for row in rows], dtype=np.str_),
        seconds=np.array([row[1] for row in rows]),
        blocks=names[some],
        reached=np.packbits(reached[:, some], axis=0),
    )
    aside.replace(target)


def records(tree: Path, folders: list[str], loose: str, kept: Path) -> dict[str, Path]:
    """By file of tests, where what is known of it is kept, under a name that changes when it does."""
    found = {}
    for path in sorted((tree / "tests").rglob("test_*.py")):
        parts = path.relative_to(tree / "tests").parts
        if not folders or (parts[0] if len(parts) > 1 else loose) in folders:
            content = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            found[str(path.relative_to(tree))] = kept / f"{'.'.join(parts)}-{content}.npz"
    return found


class Reach:
    """By block, the tests that reach it; by test, its seconds."""

    def __init__(self) -> None:
        self.tests: dict[str, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = {}

    def add(self, stored: Path) -> None:
        """What is known of some files of tests."""
        with np.load(stored) as read:
            tests, bits = read["tests"].tolist(), read["reached"]
            self.seconds |= dict(zip(tests, read["seconds"].tolist(), strict=True))
            reached = np.unpackbits(bits, axis=0, count=len(tests)) if tests else bits
            for column, block in enumerate(read["blocks"].tolist()):
                self.tests[block].update(tests[row] for row in np.flatnonzero(reached[:, column]))


def environment(marks: Marks) -> dict[str, str]:
    """What makes a process, and those that it starts, set the marks."""
    return {"MUTATION_MARKS": str(marks.target)}


def begin() -> None:
    """Set marks in this process, whose environment names the file of them."""
    if os.environ.get("MUTATION_MARKS"):
        exec(HOOK, {})
