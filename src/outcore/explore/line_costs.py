"""What every line of the user's code takes: the time and memory of the calls that it leads to.

A call belongs to the line it was made on, and to the lines on which the blocks around it were called: ``x =
self.layer1(x)`` has the costs of all that happens in ``layer1``, and so has, further down, ``out = self.conv1(x)`` in
the block's own ``forward``, summed over the blocks that run it. A call counts once for a line, and memory that several
calls of a line save counts once (`outcore.cost.costs.total`). So the lines of one function add up to the function, and
lines of different functions overlap: they are never added to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.cost.costs import CallCost, Costs, Totals, total
from outcore.graph import Graph
from outcore.graph.parts import ancestors
from outcore.graph.source import file_of

__all__ = ["LineCost", "SourceFile", "line_costs", "source_files"]

_OURS = Path(__file__).parents[1]
_LONGEST = 400_000
"""Characters of a file that is shown."""


@dataclass(frozen=True)
class LineCost:
    """One line of code, with all that it calls."""

    file: str
    line: int
    calls: tuple[str, ...]
    blocks: tuple[str, ...]
    """The blocks that are called on this line itself, outermost first."""
    totals: Totals

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        t = self.totals
        return {
            "line": self.line,
            "blocks": list(self.blocks),
            "calls": t.calls,
            "forward_s": t.forward_s,
            "backward_s": t.backward_s,
            "saved_bytes": t.saved_bytes,
            "parameter_bytes": t.parameter_bytes,
            "workspace_bytes": t.workspace_bytes,
            "flops": t.flops_forward + t.flops_backward,
        }


@dataclass(frozen=True)
class SourceFile:
    """A file of the user's code, with the costs of its lines."""

    name: str
    path: Path
    text: str
    lines: Mapping[int, LineCost]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"name": self.name, "text": self.text, "lines": [line.to_json() for line in self.lines.values()]}


def line_costs(graph: Graph, costs: Costs) -> dict[str, dict[int, LineCost]]:
    """Files -> lines -> what they take, lines in ascending order."""
    calls: dict[str, dict[str, CallCost]] = {}
    blocks: dict[str, dict[str, None]] = {}
    for name, call in graph.calls.items():
        for path in (*ancestors(call.block), call.block):
            source = call.source if path == call.block else graph.blocks[path].source
            if source:
                calls.setdefault(source, {})[name] = costs.calls[name]
                blocks.setdefault(source, {})[path] = None
    found: dict[str, dict[int, LineCost]] = {}
    for source in sorted(calls, key=_place):
        file, line = _place(source)
        shown = tuple(_outermost(blocks[source]))
        found.setdefault(file, {})[line] = LineCost(
            file, line, tuple(calls[source]), shown, total(calls[source].values())
        )
    return found


def source_files(graph: Graph, costs: Costs) -> list[SourceFile]:
    """The files that the network's lines are in, those in which most time passes first."""
    found = []
    for name, lines in line_costs(graph, costs).items():
        first = next(iter(lines))
        where = file_of(f"{name}:{first}")
        if where is None or _is_ours(where[0]):
            continue
        try:
            text = where[0].read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if len(text) <= _LONGEST:
            found.append(SourceFile(name, where[0], text, lines))
    calls = {name: {c for line in lines.values() for c in line.calls} for name, lines in _by_file(found).items()}
    times = {name: sum(costs.calls[c].time_s for c in of_one) for name, of_one in calls.items()}
    return sorted(found, key=lambda file: (-times[file.name], file.name))


def _is_ours(path: Path) -> bool:
    """Whether a file is how we call a job's loss, and nobody's network."""
    return path.is_relative_to(_OURS) and not path.is_relative_to(_OURS / "models")


def _by_file(files: Iterable[SourceFile]) -> dict[str, Mapping[int, LineCost]]:
    return {file.name: file.lines for file in files}


def _place(source: str) -> tuple[str, int]:
    file, _, line = source.rpartition(":")
    return file, int(line) if line.isdigit() else 0


def _outermost(paths: Iterable[str]) -> list[str]:
    """The blocks that are in none of the others."""
    given = set(paths)
    return [path for path in paths if not given.intersection(ancestors(path))]
