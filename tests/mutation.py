"""Which one-line defects the quick tests notice.

A test suite is trusted because its tests fail when the code is wrong. This script tries that out: it puts one defect
at a time (a comparison flipped, a number off by one, `and` for `or`, a `not` or a statement left out, a constant
returned, two arguments swapped) into a copy of the source and runs the quick tests that reach it until one fails.

First all quick tests run once, folder by folder, and every function of outcore that a test calls is written down, also
in the processes that the test starts. This is kept in dist/mutation, by functions' names, and made again for a folder
whose files have changed. A mutant is then tried on the tests that call its function alone, the shortest of its own
package first and then those of others, which takes seconds instead of an hour. Three ends: *killed* (a test failed or
ran out of time), *survived* (all passed), *uncalled* (no quick test calls the function). Defects are drawn by a seed,
for each package a share by its length and at least a dozen. Not drawn from: kernels of a GPU, words of messages,
annotations, and code that is executed when a module is imported.

    make mutants                                     300 mutants, table in dist/mutants.md
    python -m tests.mutation --count 40 --packages planner cost --seed 7
    python -m tests.mutation --packages program --tests program planner    what these folders of tests notice
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TRACE = '''"""Write down every function of outcore that is called, and when."""
import os, sys, threading, time

def begin(target):
    out, seen, cleared = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT), set(), [time.monotonic()]
    def called(frame, event, _):
        if time.monotonic() - cleared[0] > 0.1:
            seen.clear()
            cleared[0] = time.monotonic()
        code = frame.f_code
        if code not in seen:
            seen.add(code)
            where = code.co_filename
            if "/src/outcore/" in where:
                name = where.rpartition("/src/outcore/")[2]
                os.write(out, f"{time.time()} {name}:{code.co_qualname}\\n".encode())
    threading.settrace(called)
    sys.settrace(called)
    return seen

if target := os.environ.get("MUTATION_TRACE"):
    begin(target)
'''
COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
COMPUTED: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*",
}  # fmt: skip
NO_TESTS = 5  # pytest's exit status where everything was deselected
CONSTANTS = {"bool": ("True", "False"), "int": ("0", "1"), "float": ("0.0", "1.0"), "str": ("''",)}
LOOSE = "outcore"
"""What the modules beside the packages, and the tests beside the folders, are called."""


@dataclass
class Mutant:
    """A defect: the text between two places of a file and what stands there instead."""

    file: str
    line: int
    function: str
    """Its name, as its code object says."""
    kind: str
    start: int
    stop: int
    text: str
    shown: str = ""
    end: str = ""
    by: str = ""
    time_s: float = 0.0

    @property
    def package(self) -> str:
        """The folder of the file."""
        return self.file.split("/")[0] if "/" in self.file else LOOSE


def defects(file: str, source: str) -> Iterator[Mutant]:
    """Every defect that can be put into a file."""
    starts = [0]
    for row in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    data = source.encode()

    def text(node: ast.AST) -> str:
        return data[slice(*span(node))].decode()

    def span(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def between(left: ast.AST, right: ast.AST, old: str, new: str) -> tuple[int, int, str] | None:
        """The operator between two operands."""
        start, stop = span(left)[1], span(right)[0]
        gap = data[start:stop].decode()
        return (start, stop, gap.replace(old, new, 1)) if gap.count(old) == 1 else None

    def at(node: ast.AST) -> Iterator[tuple[str, tuple[int, int, str] | None]]:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                old = {ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not"}.get(type(op))
                old = old or {"<=": "<", "<": "<=", ">=": ">", ">": ">=", "!=": "==", "==": "!="}[COMPARED[type(op)]]
                yield "comparison", between(left, right, old, COMPARED[type(op)])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED and not _is_text(left, right):
                old = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"}
                yield "arithmetic", between(left, right, old[type(op)], COMPUTED[type(op)])
            case ast.BoolOp(op=op, values=[left, right, *_]):
                old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                yield "and/or", between(left, right, old, new)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield "not left out", (span(node)[0], span(operand)[0], "")
            case ast.Constant(value=bool() as value):
                yield "constant", (*span(node), str(not value))
            case ast.Constant(value=int() as value):
                yield "off by one", (*span(node), str(value + 1))
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield "condition", (*span(test), f"not ({text(test)})")
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield "statement left out", (*span(node), "pass")
            case ast.Continue():
                yield "continue", (*span(node), "break")
            case ast.Call(func=ast.Name(id="min" | "max" as name) as func):
                yield "min/max", (*span(func), "min" if name == "max" else "max")
            case ast.Call(args=[first, second, *_]) if not isinstance(first, ast.Starred | ast.GeneratorExp):
                if not isinstance(second, ast.Starred) and text(first) != text(second):
                    gap = data[span(first)[1] : span(second)[0]].decode()
                    yield "arguments swapped", (span(first)[0], span(second)[1], text(second) + gap + text(first))

    def walk(node: ast.AST, function: str, inside: str, returns: str) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = inside + node.name
            within = f"{name}." if isinstance(node, ast.ClassDef) else f"{name}.<locals>."
            if not isinstance(node, ast.ClassDef):
                function, returns = name, ast.unparse(node.returns) if node.returns else ""
            for child in node.body:
                yield from walk(child, function, within, returns)
            return
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
            return
        if function:
            made = list(at(node))
            if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
                for constant in CONSTANTS.get(returns, ("None",) if "None" in returns else ()):
                    made.append(("returned constant", (*span(node.value), constant)))
            for kind, change in made:
                if change is not None:
                    row = node.test.lineno if isinstance(node, ast.If | ast.While) else node.lineno  # type: ignore[attr-defined]
                    yield Mutant(file, row, function, kind, *change)
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "decorator_list", "returns"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from walk(child, function, inside, returns)

    yield from walk(ast.parse(source), "", "", "")


def _is_text(*nodes: ast.AST) -> bool:
    return any(isinstance(n, ast.JoinedStr) or isinstance(getattr(n, "value", None), str) for n in nodes)


def draw(source: Path, count: int, packages: list[str], seed: int) -> list[Mutant]:
    """Mutants of every package, a share by its length and at least a dozen; no two in one line."""
    found: dict[str, list[Mutant]] = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        if "kernels" not in path.parts and not path.name.endswith(("triton_kernels.py", "_cuda.py")):
            words = path.read_text()
            for mutant in defects(str(path.relative_to(source)), words):
                wrong = words.encode()[: mutant.start] + mutant.text.encode() + words.encode()[mutant.stop :]
                begin, end = words.encode().rfind(b"\n", 0, mutant.start), wrong.find(b"\n", mutant.start)
                mutant.shown = " ".join(wrong[begin + 1 : end].decode().split())
                found[mutant.package].append(mutant)
    chosen = [p for p in sorted(found) if not packages or p in packages]
    total = sum(len(found[p]) for p in chosen)
    spare = max(count - 12 * len(chosen), 0)
    drawn = []
    for package in chosen:
        share = min(12, max(1, count // len(chosen))) + round(spare * len(found[package]) / total)
        rows = random.Random(f"{seed} {package}").sample(found[package], len(found[package]))
        drawn += list({(m.file, m.line): m for m in reversed(rows)}.values())[::-1][:share]
    return drawn


class Tests:
    """The quick tests, run in a fork of this process, which has torch and the rest imported already."""

    def __init__(self, tree: Path, records: Path, folders: list[str]) -> None:
        self.tree, self.records = tree, records
        self.calls: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        """By function and folder of tests, the tests that call it."""
        self.seconds: dict[str, float] = {}
        there = sorted(p.name for p in (tree / "tests").iterdir() if any(p.rglob("test_*.py")))
        for folder in folders or [LOOSE, *there]:
            calls, seconds = self.calling(folder)
            self.seconds |= seconds
            for function, names in calls.items():
                self.calls[function][folder] = names

    def call(self, arguments: list[str], time_s: float, before: Callable[[], Any] = lambda: None) -> int | None:
        """Pytest's exit status; none if it ran out of time."""
        child = os.fork()
        if not child:
            os.setsid()
            os.chdir(self.tree)
            out = os.open(self.tree / "out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            sys.path[:0] = [str(self.tree / "src"), str(self.tree)]
            sys.modules.pop("tests", None)  # the tree has its own
            sys.dont_write_bytecode = True
            os.environ |= {"PYTHONPATH": f"{self.tree}/src:{self.tree}", "PYTHONDONTWRITEBYTECODE": "1"}
            code = 70
            try:
                import pytest

                code = int(
                    pytest.main(["-m", "not slow and not gpu and not kernel", "-p", "no:xdist", *arguments], [before()])
                )
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        end = time.monotonic() + time_s
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                _end_group(child)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        _end_group(child)
        os.waitpid(child, 0)
        return None

    def calling(self, folder: str) -> tuple[dict[str, set[str]], dict[str, float]]:
        """By function, the tests of a folder that call it; by test, its seconds."""
        paths = sorted((self.tree / "tests").glob("test_*.py") if folder == LOOSE else [self.tree / "tests" / folder])
        files = [p for path in paths for p in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
        content = hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()[:12]
        stored = self.records / f"{folder}-{content}.json"
        if not stored.exists():
            for old in self.records.glob(f"{folder}-????????????.json"):
                old.unlink()
            trace = self.records / f"{folder}.trace"
            trace.unlink(missing_ok=True)
            times: Path = trace.with_suffix(".times")

            def before() -> Any:
                space: dict[str, Any] = {}
                exec(TRACE, space)
                os.environ["MUTATION_TRACE"] = str(trace)
                return _Times(times, space["begin"](str(trace)))

            print(f"which test of {folder} calls what", flush=True)
            code = self.call([str(p.relative_to(self.tree)) for p in paths], 7200, before)
            if code not in (0, 1, NO_TESTS):
                raise RuntimeError(f"the tests of {folder} did not run:\n{(self.tree / 'out.txt').read_text()}")
            stored.write_text(json.dumps(_joined(times, trace)))
            trace.unlink()
        read = json.loads(stored.read_text())
        return {where: set(tests) for where, tests in read["calls"].items()}, read["seconds"]


class _Times:
    """A plugin of pytest that writes down when each test began and ended, and whether it passed."""

    def __init__(self, target: Path, seen: set[Any]) -> None:
        self.out, self.seen, self.began, self.good = target.open("w"), seen, 0.0, True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.seen.clear()
        self.began, self.good = time.time(), True

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.good = self.good and report.passed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        print(json.dumps([nodeid, self.began, time.time(), self.good]), file=self.out, flush=True)


def _joined(times: Path, trace: Path) -> dict[str, Any]:
    """Which test ran when a function was called."""
    rows = [json.loads(line) for line in times.read_text().splitlines()]
    begins = [row[1] for row in rows]
    calls: dict[str, set[str]] = defaultdict(set)
    with trace.open() as lines:
        for line in lines:
            at, _, where = line.rstrip("\n").partition(" ")
            index = bisect_right(begins, float(at)) - 1
            if index >= 0 and rows[index][3] and float(at) <= rows[index][2]:
                calls[where].add(rows[index][0])
    return {"calls": {k: sorted(v) for k, v in calls.items()}, "seconds": {r[0]: r[2] - r[1] for r in rows if r[3]}}


def _end_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def chosen_for(mutant: Mutant, tests: Tests, seconds: float) -> tuple[list[str], int]:
    """The shortest tests that call its function, half of the time for its own package's; how many there are."""
    times, chosen, total = tests.seconds, list[str](), 0.0
    able = tests.calls.get(f"{mutant.file}:{mutant.function}", {})
    own = able.get(mutant.package, set())
    for names, limit in ((own, seconds / 2), (set().union(*able.values()), seconds)):
        for name in sorted(names - set(chosen), key=lambda name: times[name]):
            if chosen and total + times[name] > limit:
                break
            chosen.append(name)
            total += times[name]
    return chosen, sum(map(len, able.values()))


def try_out(mutant: Mutant, tests: Tests, seconds: float) -> None:
    """Put the defect in, run tests that call its function, take it out."""
    chosen, able = chosen_for(mutant, tests, seconds)
    total = sum(tests.seconds[name] for name in chosen)
    if not chosen:
        mutant.end = "uncalled"
        return
    path = tests.tree / "src" / "outcore" / mutant.file
    right = path.read_bytes()
    path.write_bytes(right[: mutant.start] + mutant.text.encode() + right[mutant.stop :])
    began = time.monotonic()
    try:
        code = tests.call(["-x", "--tb=line", *chosen], 30 + 4 * total)
    finally:
        path.write_bytes(right)
    mutant.time_s = time.monotonic() - began
    if code in (4, 5):  # of pytest: it was asked for tests that are not there
        raise RuntimeError((tests.tree / "out.txt").read_text(errors="replace"))
    mutant.end = "survived" if code == 0 else "killed"
    said = (tests.tree / "out.txt").read_text(errors="replace").splitlines()
    failed = [line for line in said if line.startswith(("FAILED", "ERROR"))]
    mutant.by = "time" if code is None else (failed[0][:120] if failed else f"{len(chosen)} of {able} tests")


def copy(target: Path) -> None:
    """The tracked files and those that are new, without compiled ones: a defect must be read from its source."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    (target / "sitecustomize.py").write_text(TRACE)


def table(mutants: list[Mutant]) -> str:
    """What was killed, by package, and those that were not."""
    lines = ["| package | mutants | killed | survived | uncalled |", "|---|---|---|---|---|"]
    rows = {p: [m for m in mutants if m.package == p] for p in sorted({m.package for m in mutants})}
    for name, of in [*rows.items(), ("all", mutants)]:
        ends = [sum(m.end == end for m in of) for end in ("killed", "survived", "uncalled")]
        lines.append(f"| {name} | {len(of)} | {ends[0]} ({ends[0] / max(len(of), 1):.0%}) | {ends[1]} | {ends[2]} |")
    lines += ["", "| not killed | defect | becomes | tests |", "|---|---|---|---|"]
    for m in mutants:
        if m.end != "killed":
            lines.append(
                f"| {m.file}:{m.line} | {m.kind} | `{m.shown.replace('|', chr(92) + '|')}` | {m.by or m.end} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=40.0, help="of tests per mutant, at most")
    parser.add_argument("--packages", nargs="*", default=[])
    parser.add_argument("--tests", nargs="*", default=[], help=f"folders of tests ({LOOSE}: those beside them); all")
    parser.add_argument("--records", type=Path, default=ROOT / "dist" / "mutation", help="keeps which test calls what")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "mutants")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for name in ("torch", "pytest", "scipy.optimize", "sklearn"):
        __import__(name)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        given.records.mkdir(parents=True, exist_ok=True)
        copy(tree)
        tests, done = Tests(tree, given.records, given.tests), []
        for mutant in draw(tree / "src" / "outcore", given.count, given.packages, given.seed):
            try_out(mutant, tests, given.seconds)
            done.append(mutant)
            print(f"{mutant.end:8} {mutant.time_s:5.1f} s  {mutant.file}:{mutant.line}  {mutant.shown}", flush=True)
            given.out.with_suffix(".md").write_text(table(done))
            given.out.with_suffix(".json").write_text(json.dumps([asdict(m) for m in done], indent=1))
    print(table(done))


if __name__ == "__main__":
    main()
