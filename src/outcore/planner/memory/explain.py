"""What a plan for one device does, block by block, in words and figures.

For each block: how much of what its backward needs is made again, sent below the device or held in a smaller form, and
the time that takes. Bytes are those that autograd would have kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outcore.machine.units import format_bytes, format_time
from outcore.planner.memory.evaluate import StepModel
from outcore.program.policies import Recompute, kind_of_policy

if TYPE_CHECKING:
    from outcore.planner.memory.plan import MemoryPlan

_COLUMNS = {"recompute": "made again", "offload": "sent away", "encode": "encoded", "keep": "held for others"}
_LEAST_S = 5e-7
"""Less is not worth a figure."""


def explain(plan: MemoryPlan, depth: int = 1, *, timed: bool = True) -> str:
    """What was chosen and what it costs, by block down to a depth; without times where those of calls are not known."""
    ratio = plan.peak_bytes / max(1, plan.plain_bytes)
    step = f", step {plan.slowdown:.3f}x of plain" if timed else ""
    peak = f"peak {format_bytes(plan.peak_bytes)} ({ratio:.2f} of plain {format_bytes(plan.plain_bytes)})"
    lines = [f"{peak}{step} (predicted)"]
    if plan.order.why:
        lines.append(f"  memory order: {plan.order}")
    if plan.chunked is not None:
        lines.append(f"  {plan.chunked}, {format_bytes(plan.chunked.chunk_bytes)} each")
    if not plan.policy and plan.state.idle:
        return "\n".join(lines)
    lines.append(f"  the peak is in {place(plan.keeping, int(plan.outcome.curve.argmax()))}")
    if (moved := plan.outcome.transfers) is not None:
        waits = timed and moved.stall_s > _LEAST_S
        waited = f"; the device waits {format_time(moved.stall_s)} for it" if waits else ""
        disk = f", {format_bytes(moved.further_bytes)} of it by way of the disk" if moved.further_bytes else ""
        lines.append(f"  {format_bytes(moved.bytes)} leave the device and return in each step{disk}{waited}")
    if not plan.state.idle:
        lines.append(f"  {plan.state} (+{format_time(plan.state_s)})" if timed else f"  {plan.state}")
    if plan.policy:
        lines.append("  instead of being kept for backward:")
        lines += [f"  {line}" for line in _table(_rows(plan, depth), timed=timed)]
    return "\n".join(lines)


def place(keeping: StepModel, moment: int) -> str:
    """A moment of the step in words."""
    at = keeping.plain.moments[moment]
    return f"{at.phase} of {at.call}" if at.call else "the optimizer's step"


def _rows(plan: MemoryPlan, depth: int) -> dict[str, dict[str, float]]:
    """Block -> bytes by policy, and seconds."""
    rows: dict[str, dict[str, float]] = {}
    for name, how in plan.policy.items():
        buffer = plan.keeping.buffers[name]
        path = plan.keeping.graph.calls[plan.keeping.order[buffer.born]].block.split(".")
        row = rows.setdefault(".".join(path[:depth]), {})
        kind = kind_of_policy(how)
        row[kind] = row.get(kind, 0) + (buffer.bytes if buffer.savers else 0)
        if isinstance(how, Recompute):
            row["seconds"] = row.get("seconds", 0.0) + buffer.again_s
    return rows


def _table(rows: dict[str, dict[str, float]], *, timed: bool) -> list[str]:
    """Aligned columns, those that are empty left out, with a sum."""
    kinds = [kind for kind in _COLUMNS if any(row.get(kind) for row in rows.values())]
    total = {kind: sum(row.get(kind, 0) for row in rows.values()) for kind in (*kinds, "seconds")}
    if len(rows) > 1:
        rows = {**rows, "in all": total}
    least_s = _LEAST_S if timed else float("inf")
    cells = [["", *(_COLUMNS[kind] for kind in kinds), "takes" if total["seconds"] > least_s else ""]]
    for block, row in rows.items():
        sizes = [format_bytes(int(row[kind])) if row.get(kind) else "" for kind in kinds]
        seconds = row.get("seconds", 0.0)
        cells.append([block, *sizes, f"+{format_time(seconds)}" if seconds > least_s else ""])
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [_line(row, widths) for row in cells]


def _line(row: list[str], widths: list[int]) -> str:
    cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
    return "  ".join([f"{row[0]:<{widths[0]}}", *cells[1:]]).rstrip()
