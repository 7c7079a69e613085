"""What outcore knows of an operation, in one answer.

    print(outcore.ops.describe("grid_sample"))

Packages add their facets when they are imported. Those that do are loaded here, by name and only when somebody asks:
nothing in this package depends on them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from outcore.errors import OutcoreError
from outcore.ops.registry import FACETS, Op, find, operations

EXTENSIONS = (
    "outcore.ops",
    "outcore.cost.predicted.describe",
    "outcore.cost.predicted.memory_traffic",
    "outcore.stream.rules",
    "outcore.fusion.rules",
    "outcore.scan.study.sparsity",
)
"""Modules that add facets."""


@dataclass(frozen=True)
class OperationFacts:
    """An operation, and in words what is known of it."""

    operation: Op
    facts: dict[str, str]
    """By facet; empty where nothing is known."""

    def __str__(self) -> str:
        op = self.operation
        width = max(map(len, self.facts))
        rows = [f"  {name:{width}}  {fact or '-'}" for name, fact in self.facts.items()]
        return "\n".join([f"{op.name} ({op.kind}), recorded as {', '.join(op.types)}", *rows])


def describe(type_: str) -> OperationFacts:
    """All that is known of the operation that is recorded under a name.

    >>> known = describe("ReLU")
    >>> known.operation.name, known.facts["again"], known.facts["backward reads"], known.facts["saved"]
    ('relu', 'pure', 'sign', 'output')
    >>> known.facts["tile"]
    'stream.rules.pointwise'

    Raises:
        OutcoreError: the catalogue has no such operation.
    """
    facets = _facets()
    op = find(type_)
    if op is None:
        raise OutcoreError(f"no operation is recorded as {type_!r}; outcore.ops.catalogue lists those that are known")
    return OperationFacts(op, {name: _words(op.facts.get(name)) for name in facets})


def markdown() -> str:
    """Two tables: what is asked of operations, and for each of them what is known, and where."""
    facets = _facets()
    lines = ["| what is known | meaning |", "| --- | --- |"]
    lines += [f"| {name} | {FACETS[name].question} |" for name in facets]
    lines += ["", f"| operation | recorded as | {' | '.join(facets)} |", "|" + " --- |" * (2 + len(facets))]
    kind = ""
    for op in operations():
        if op.kind != kind:
            kind = op.kind
            lines.append(f"| **{kind}** |" + " |" * (1 + len(facets)))
        others = ", ".join(type_ for type_ in op.types if type_ != op.name)
        cells = (_words(op.facts.get(name)).replace("|", "\\|") for name in facets)
        lines.append(f"| {op.name} | {others} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _facets() -> list[str]:
    """The names of all facets, once every package has added its own."""
    for module in EXTENSIONS:
        importlib.import_module(module)
    return sorted(FACETS)


def _words(fact: Any) -> str:
    if fact is None:
        return ""
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    if isinstance(fact, str):
        return fact
    if is_dataclass(fact) and not isinstance(fact, type):
        return ", ".join(_parts(fact)) or "nothing"
    return str(getattr(fact, "__module__", type(fact).__module__)).removeprefix("outcore.")


def _parts(fact: Any) -> Iterator[str]:
    """The fields of a value that say something, in words."""
    if hasattr(fact, "words"):
        yield from fact.words()
        return
    for one in fields(fact):
        value = getattr(fact, one.name)
        if value:
            yield one.name.replace("_", " ") if value is True else f"{one.name.replace('_', ' ')} {value}".strip()
