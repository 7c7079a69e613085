"""Every one-line defect of a source file, and a drawing of some of them.

Not drawn, because no quick test could or should notice them: words of messages, of errors and of logs; annotations and
code that is executed when a module is imported; and what only a GPU executes: files of CUDA graphs, and functions that
call `torch.cuda` themselves (the `gpu` tests are for them).
"""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
COMPUTED: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*",
}  # fmt: skip
CONSTANTS = {"bool": ("True", "False"), "int": ("0", "1"), "float": ("0.0", "1.0"), "str": ("''",)}
ON_A_GPU = re.compile(r"torch\.cuda\.(?!is_available|device_count|is_initialized|OutOfMemoryError)")
IF_ON_A_GPU = re.compile(r"""^[^!]*(== "cuda"|\.is_cuda\b|cuda\.is_available\(\))[^!]*$""")
WORDS = re.compile(r"^(warnings\.warn|log\w*\.\w+|logging\.\w+)$")
CHECKS = ("strict", "flush", "stacklevel")
"""Arguments that change nothing in a program that is right: `zip(..., strict=True)` is an assertion."""
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
    tests: str = ""
    """The files of tests that are asked; where none is named, those that reach the block."""

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
                if ON_A_GPU.search(text(node)):
                    return
                function, returns = name, ast.unparse(node.returns) if node.returns else ""
            for child in node.body:
                yield from walk(child, function, within, returns)
            return
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
            return
        called = node.value if isinstance(node, ast.Expr) else node
        if isinstance(called, ast.Call) and WORDS.match(text(called.func)):
            return
        if isinstance(node, ast.keyword) and node.arg in CHECKS:
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
        device = isinstance(node, ast.If) and IF_ON_A_GPU.match(text(node.test)) and " not " not in text(node.test)
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "decorator_list", "returns") and not (device and name == "body"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from walk(child, function, inside, returns)

    yield from walk(ast.parse(source), "", "", "")


def _is_text(*nodes: ast.AST) -> bool:
    return any(isinstance(n, ast.JoinedStr) or isinstance(getattr(n, "value", None), str) for n in nodes)


def draw(source: Path, count: int, packages: list[str], seed: int) -> list[Mutant]:
    """Mutants of every package, a share by what there is to change and at least five; no two in one line.

    Swapped arguments are the most frequent kind and the one that is noticed most easily: of them one in three is left.
    """
    found: dict[str, list[Mutant]] = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        if "cuda_graphs" not in path.parts and not path.name.endswith("_cuda.py"):
            words = path.read_text()
            for mutant in defects(str(path.relative_to(source)), words):
                wrong = words.encode()[: mutant.start] + mutant.text.encode() + words.encode()[mutant.stop :]
                begin, end = words.encode().rfind(b"\n", 0, mutant.start), wrong.find(b"\n", mutant.start)
                mutant.shown = " ".join(wrong[begin + 1 : end].decode().split())
                found[mutant.package].append(mutant)
    chosen = [p for p in sorted(found) if not packages or p in packages]
    total = sum(len(found[p]) for p in chosen)
    least = min(5, max(1, count // len(chosen)))
    spare = max(count - least * len(chosen), 0)
    drawn = []
    for package in chosen:
        share = least + round(spare * len(found[package]) / total)
        chance = random.Random(f"{seed} {package}")
        rows = chance.sample(found[package], len(found[package]))
        rows = [m for m in rows if m.kind != "arguments swapped" or chance.random() < 1 / 3]
        drawn += list({(m.file, m.line): m for m in reversed(rows)}.values())[::-1][:share]
    return random.Random(seed).sample(drawn, len(drawn))
