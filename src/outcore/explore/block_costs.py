"""What every block takes, at all depths at once, as rows of numbers for the page.

Time and FLOPs of a block are those of the calls inside it. Memory is counted as in `Costs.total`: what several calls of
a block save is saved once. What is held at the peak of the step stands beside it, by kind, because the two differ: a
feature map that is freed before the peak is saved and does not matter.
"""

from __future__ import annotations

from typing import Any

from outcore.cost.costs import Costs
from outcore.cost.predicted.step_memory import MemoryCurve
from outcore.graph import Graph
from outcore.graph.parts import ROOT, ancestors

__all__ = ["CATEGORIES", "block_rows", "call_rows", "kind_rows"]

CATEGORIES = ("weights", "gradients", "state", "inputs", "feature_maps", "feature_gradients", "workspace")
"""Kinds of memory, in the order of `BytesByUse`."""


def block_rows(graph: Graph, costs: Costs, memory: MemoryCurve) -> dict[str, Any]:
    """Columns, and a row of numbers for every block by path."""
    columns = ["forward_s", "backward_s", "flops", "saved_bytes", "workspace_bytes", *CATEGORIES]
    rows: dict[str, list[float]] = {path: [0.0] * len(columns) for path in graph.blocks}
    saved: dict[str, dict[str, int]] = {path: {} for path in graph.blocks}
    for cost in costs.calls.values():
        kept = {s.of: s.bytes for s in cost.saved if s.kind in ("value", "derived")}
        for path in (ROOT, *ancestors(cost.block), cost.block):
            if path not in rows:
                continue
            row = rows[path]
            row[0] += cost.forward.median_s if cost.forward else 0.0
            row[1] += cost.backward.median_s if cost.backward else 0.0
            row[2] += cost.flops_forward + cost.flops_backward
            row[4] = max(row[4], cost.workspace_forward_bytes, cost.workspace_backward_bytes)
            saved[path].update(kept)
    for path, kept in saved.items():
        rows[path][3] = sum(kept.values())
    for held in memory.composition:
        place = 5 + CATEGORIES.index(held.category)
        for path in dict.fromkeys((ROOT, *ancestors(held.block), held.block)):
            if path in rows:
                rows[path][place] += held.bytes
    return {"columns": columns, "rows": {path: [_short(v) for v in row] for path, row in rows.items()}}


def call_rows(graph: Graph, costs: Costs) -> list[list[Any]]:
    """Name, block, forward and backward seconds and saved bytes of every call, in the order of execution."""
    found = []
    for name, call in graph.calls.items():
        cost = costs.calls[name]
        times = [cost.forward.median_s if cost.forward else 0.0, cost.backward.median_s if cost.backward else 0.0]
        saved = sum({s.of: s.bytes for s in cost.saved if s.kind in ("value", "derived")}.values())
        found.append([name, call.block, *map(_short, times), saved])
    return found


def kind_rows(costs: Costs) -> list[list[Any]]:
    """Type, calls, forward and backward seconds and saved bytes by kind of layer, the most time first."""
    return [
        [kind, t.calls, _short(t.forward_s), _short(t.backward_s), t.saved_bytes] for kind, t in costs.by_kind().items()
    ]


def _short(value: float) -> float:
    """Five digits are more than any prediction has, and keep the page small."""
    return int(value) if float(value).is_integer() else float(f"{value:.5g}")
