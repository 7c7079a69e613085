"""Graphs, costs, plans and timelines as HTML, for notebooks: what ``_repr_html_`` of each returns.

A graph is the interactive drawing of `outcore graph --html` in a frame of its own; the others are tables and pictures
that also show where scripts are not run, as on GitHub. Everything that comes from a job is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from outcore.cost.costs import Costs, Totals
from outcore.graph import Graph
from outcore.machine.units import format_bytes, format_time
from outcore.program import Timeline, chart
from outcore.program.plan.document import Plan
from outcore.program.policies import kind_of_policy, parse_policy
from outcore.report.bundle import bundle
from outcore.report.page import page

__all__ = ["costs_html", "graph_html", "plan_html", "timeline_html"]

_FRAME = "width:100%;height:620px;border:1px solid #8884;border-radius:8px"
_MOST_RANKS = 64


def graph_html(graph: Graph) -> str:
    """The network's page, in a frame."""
    inside = escape(page(bundle(graph)), quote=True)
    return f'<iframe sandbox="allow-scripts" style="{_FRAME}" srcdoc="{inside}"></iframe>'


def costs_html(costs: Costs) -> str:
    """Time and memory by block and by kind of layer."""
    whole = costs.total()
    head = f"<b>{escape(costs.model)}</b> on {escape(costs.device)}: {len(costs.calls)} calls, "
    times = f"forward {format_time(whole.forward_s)}, backward {format_time(whole.backward_s)}, "
    kept = f"{format_bytes(whole.saved_bytes)} saved for backward"
    blocks = _cost_table("block", costs.by_depth(1).items(), whole)
    return f"<div>{head}{times}{kept}{blocks}{_cost_table('kind', costs.by_kind().items(), whole)}</div>"


def plan_html(plan: Plan) -> str:
    """What a plan decides: arrangement, policies, prediction, reasons."""
    facts = [("arrangement", plan.arrangement), ("schedule", f"{plan.schedule}, {plan.micro_batches} micro-batches")]
    facts.append(("exactness", plan.exactness))
    if plan.memory_bytes is not None:
        facts.append(("budget of a rank", format_bytes(plan.memory_bytes)))
    if plan.predicted is not None:
        peak = format_bytes(max(plan.predicted.peak_bytes))
        facts.append(("predicted", f"step {format_time(plan.predicted.time_s)}, peak {peak}"))
    counts = Counter(kind_of_policy(parse_policy(how)) for how in plan.policy.values())
    if counts:
        facts.append(("saved tensors", ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))))
    many = enumerate(plan.stages) if len(plan.stages) > 1 else ()
    rows = [[f"stage {k}", " … ".join(dict.fromkeys((stage[0], stage[-1])))] for k, stage in many]
    why = "".join(f"<li>{escape(line)}</li>" for line in plan.why)
    reasons = f"<details><summary>why</summary><ul>{why}</ul></details>" if why else ""
    return f"<div>{_table([], [[name, text] for name, text in facts] + rows)}{reasons}</div>"


def timeline_html(timeline: Timeline) -> str:
    """The picture of a timeline; its table where there are more ranks than a picture can show."""
    if len(timeline) > _MOST_RANKS:
        return f"<pre>{escape(str(timeline))}</pre>"
    return f'<div style="overflow-x:auto;background:#fff">{chart(timeline)}</div>'


def _cost_table(name: str, rows: Iterable[tuple[str, Totals]], whole: Totals) -> str:
    cells = []
    for path, t in rows:
        share = t.time_s / whole.time_s if whole.time_s else 0.0
        bar = f'<div style="background:#3b82c4;height:8px;border-radius:4px;width:{share * 120:.0f}px"></div>'
        times = [format_time(t.forward_s), format_time(t.backward_s)]
        cells.append([escape(path), *times, f"{share:.0%}", bar, format_bytes(t.saved_bytes)])
    return _table([name, "forward", "backward", "share", "", "saved"], cells, escaped=True)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, escaped: bool = False) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        shown = [cell if escaped or tag == "th" else escape(cell) for cell in cells]
        return "<tr>" + "".join(f'<{tag} style="text-align:left">{cell}</{tag}>' for cell in shown) + "</tr>"

    top = row([escape(cell) for cell in head], "th") if head else ""
    return f"<table>{top}{''.join(row(cells, 'td') for cells in rows)}</table>"
