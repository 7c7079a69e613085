"""What an editor shows of a job: a few words for every line, worked out in a process of their own.

The facts of a file are plain values: per line a hint, a longer text for the pointer, the shapes that the line's blocks
return; for the job its throughput, its peak memory and whether that is within the budget. They are made by the same
functions as the page (`outcore.explore.line_costs`, `outcore.cost.profile`), so both say the same numbers.

    python -m outcore.explore.editor_facts < settings.json > facts.json
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from outcore.cost.costs import Costs
from outcore.cost.profile import Profile, profile
from outcore.explore.child_process import leave_with_parent
from outcore.explore.line_costs import LineCost, source_files
from outcore.explore.parts import ExploreSettings
from outcore.explore.worker import trouble_of
from outcore.graph import Graph
from outcore.graph.source import file_of
from outcore.machine import format_bytes, format_rate, format_time, known, parse
from outcore.machine.units import parse_bytes

__all__ = ["editor_facts", "main"]

_SHAPES = 6
"""Blocks of a line whose shapes are listed."""


def editor_facts(settings: ExploreSettings) -> dict[str, Any]:
    """The facts of a job, by absolute path of its files."""
    where = parse(settings.machine) if settings.machine else known()
    shown = profile(settings.load(), where.devices[0], size=settings.batch)
    budget = parse_bytes(settings.memory) if settings.memory else shown.device.memory_bytes
    files = {}
    for source in source_files(shown.graph, shown.costs):
        lines = [_line(cost, shown.graph, shown.costs) for cost in source.lines.values()]
        files[str(source.path.resolve())] = {"lines": lines, "functions": _functions(source.text, source.lines)}
    return {"files": files, "summary": _summary(shown, budget)}


def _summary(shown: Profile, budget_bytes: int) -> dict[str, Any]:
    peak, step = shown.memory.peak_bytes, shown.step
    at = shown.memory.peak
    where = file_of(shown.graph.calls[at.call].source) if at.call else None
    fits = f"{format_bytes(peak)} of {format_bytes(budget_bytes)}"
    return {
        "lens": (
            f"{shown.per_second:,.1f} samples/s · step {format_time(step.step_s)} · peak {fits} · "
            f"batch {shown.size} on {shown.device.name} ({step.source})"
        ),
        "peak_bytes": peak,
        "budget_bytes": budget_bytes,
        "over": peak > budget_bytes,
        "message": (
            f"a training step takes {format_bytes(peak)}, {format_bytes(peak - budget_bytes)} more than "
            f"{format_bytes(budget_bytes)}; the peak is reached in {at.phase} of {at.call or 'the optimizer'}. "
            "outcore plan finds what to recompute or to offload"
        ),
        "file": str(where[0].resolve()) if where else "",
        "line": where[1] if where else 0,
    }


def _line(cost: LineCost, graph: Graph, costs: Costs) -> dict[str, Any]:
    t, whole = cost.totals, costs.total()
    share = t.time_s / whole.time_s if whole.time_s else 0.0
    rows = [
        f"**{format_time(t.time_s)}** of forward and backward, {share:.1%} of the network",
        f"| | |\n|---|---:|\n| forward | {format_time(t.forward_s)} |\n| backward | {format_time(t.backward_s)} |\n"
        f"| saved for backward | {format_bytes(t.saved_bytes)} |\n| workspace | {format_bytes(t.workspace_bytes)} |\n"
        f"| parameters | {format_bytes(t.parameter_bytes)} |\n"
        f"| matrix work | {format_rate(t.flops_forward + t.flops_backward, 'FLOP')} |",
    ]
    shapes = [_shapes(path, graph, cost.calls) for path in cost.blocks[:_SHAPES]]
    if len(cost.blocks) > _SHAPES:
        shapes.append(f"- and {len(cost.blocks) - _SHAPES} more")
    return {
        "line": cost.line,
        "hint": f"{format_time(t.time_s)} · {format_bytes(t.saved_bytes)}",
        "share": share,
        "hover": "\n\n".join([*rows, "\n".join(shapes)]),
        "over_bytes": t.saved_bytes,
    }


def _shapes(path: str, graph: Graph, on_this_line: Container[str]) -> str:
    """A block with the shapes of what it returns on a line: functions and shared blocks are called on others too."""
    calls = [call for call in graph.leaves(path) if call.name in on_this_line]
    inside = {call.name for call in calls}
    out = [
        value
        for call in calls
        for value in call.outputs
        if value in graph.outputs or any(c not in inside for c in graph.values[value].consumers)
    ]
    shown = ", ".join("×".join(map(str, graph.values[v].shape)) or "scalar" for v in out[:3])
    return f"- `{path}` {graph.blocks[path].type} → {shown or 'nothing'}"


def _functions(text: str, lines: Mapping[int, LineCost]) -> list[int]:
    """Lines of the ``def`` around lines that take time, that of the slowest line first."""
    rows = text.splitlines()
    found: dict[int, None] = {}
    for number in sorted(lines, key=lambda n: -lines[n].totals.time_s):
        inside = (at for at in range(min(number, len(rows)), 0, -1) if rows[at - 1].lstrip().startswith("def "))
        if (at := next(inside, None)) is not None:
            found[at] = None
    return list(found)


def main() -> None:
    """Read settings, write facts or what went wrong; what the job prints goes to standard error."""
    leave_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    given = json.load(sys.stdin)
    lists = {name: tuple(given.get(name, ())) for name in ("inputs", "arguments")}
    try:
        found = editor_facts(ExploreSettings(**(given | lists)))
    except BaseException as error:  # a job may raise anything, also SystemExit
        trouble = trouble_of(error)
        where = file_of(trouble["place"])
        place = {"file": str(where[0].resolve()), "line": where[1]} if where else {"file": "", "line": 0}
        job = Path(given["job"])
        found = {"trouble": trouble | (place if place["file"] else {"file": str(job.resolve()), "line": 1})}
    answers.write(json.dumps(found))
    answers.flush()
    os._exit(0)  # threads of the job must not keep it alive


if __name__ == "__main__":
    main()
