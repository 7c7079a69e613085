"""The frontier of time against memory, as a table for a terminal and as a picture.

A frontier is found in the time that the device computes. What a user sees elsewhere is the time of a step, including
the host's share, the loss and the optimizer, so every time that is shown here is that step's time and what the policies
add to it: one number for plain training everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from outcore.figure import Axes, Span, bytes_unit, document, legend, line, text
from outcore.machine.units import format_bytes, format_time
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.search import Assignment
from outcore.program.policies import kind_of_policy, policies_to_json

__all__ = ["frontier_json", "frontier_svg", "frontier_table"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 560, 396, 66, 78, 54, 20


def policy_counts(keeping: StepModel, one: Assignment) -> str:
    """How many buffers have which policy."""
    counts = Counter(kind_of_policy(how) for how in keeping.resolved(one.policy).values())
    names = {"keep": "hold"}
    return ", ".join(f"{names.get(how, how)} {count}" for how, count in sorted(counts.items())) or "nothing"


def frontier_table(
    keeping: StepModel,
    found: Sequence[Assignment],
    chosen: Assignment | None = None,
    *,
    plain_s: float | None = None,
    plain_bytes: int | None = None,
) -> Table:
    """A row per assignment; the plan's own is marked.

    Args:
        keeping: the network's memory.
        found: the frontier.
        chosen: the plan's own assignment.
        plain_s: the time of a plain step, as it is shown elsewhere.
        plain_bytes: and its peak.
    """
    table = Table(title="time against memory (predicted)", title_justify="left", box=None, pad_edge=False)
    for name in ("peak", "of plain", "step", "of plain", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_column("pieces of memory, by what is done with them")
    whole_s, whole = plain_s or keeping.plain_s, plain_bytes or keeping.plain.peak_bytes
    most = max(_over_plain(whole_s, a) for a in found)
    if found[0].policy:  # something smaller is as fast
        plain = format_bytes(whole), "1.00", format_time(whole_s), "1.000x"
        table.add_row(*plain, "█" * round(16 / most), "plain training: all are kept")
    for one in found:
        over, peak = _over_plain(whole_s, one), one.outcome.peak_bytes if one.policy else whole
        table.add_row(
            format_bytes(peak),
            f"{peak / whole:.2f}",
            format_time(over * whole_s),
            f"{over:.3f}x",
            "█" * round(16 * over / most),
            policy_counts(keeping, one) + (" (this plan)" if one is chosen else ""),
        )
    return table


def frontier_json(
    keeping: StepModel, found: Sequence[Assignment], *, plain_s: float | None = None
) -> list[dict[str, object]]:
    """Plain values."""
    whole_s = plain_s or keeping.plain_s
    return [
        {
            "peak_bytes": one.outcome.peak_bytes,
            "time_s": whole_s + one.outcome.extra_s,
            "over_plain": _over_plain(whole_s, one),
            "policy": policies_to_json(keeping.resolved(one.policy)),
        }
        for one in found
    ]


def frontier_svg(
    keeping: StepModel,
    found: Sequence[Assignment],
    *,
    name: str,
    budget_bytes: int | None = None,
    chosen: Assignment | None = None,
    plain_s: float | None = None,
    plain_bytes: int | None = None,
    tiles: tuple[int, float] | None = None,
) -> str:
    """The curve: peak memory to the right, time over plain upwards; plain training and the plan are marked.

    Args:
        tiles: peak bytes and time of the plan, where it is a step in tiles, which is on no such curve.
    """
    plain = plain_bytes or keeping.plain.peak_bytes
    unit, words = bytes_unit(plain)
    whole_s = plain_s or keeping.plain_s
    in_tiles = [] if tiles is None else [tiles[1] / max(whole_s, 1e-12)]
    high = max(1.1, *in_tiles, *(_over_plain(whole_s, a) for a in found)) * 1.03
    axes = Axes(
        _LEFT,
        _TOP,
        _WIDTH - _LEFT - _RIGHT,
        _HEIGHT - _TOP - _BOTTOM,
        Span(0.0, 1.08 * plain / unit, f"peak memory ({words})"),
        Span(1.0 - 0.04 * (high - 1.0), high, "time of a step, over plain training"),
    )
    shown = f"plain training: {format_bytes(plain)}, {format_time(whole_s)} a step (predicted)"
    out = [text(12, 20, name, "title"), text(12, 38, shown, "small quiet"), *axes.drawn()]
    entries = [("grey", "plain training"), ("blue", "fastest step for its memory")]
    marks = [("least", keeping.floor[0], ("purple", "what one operation alone needs"))]
    if budget_bytes is not None and budget_bytes / unit <= axes.x.high:
        marks.append(("limit", budget_bytes, ("vermillion", f"budget, {format_bytes(budget_bytes)}")))
    for kind, nbytes, _ in marks:
        px, _ = axes.at(nbytes / unit, axes.y.low)
        out.append(line(px, axes.top, px, axes.top + axes.height, kind))
    smaller = [a for a in found if a.policy]
    points = [(a.outcome.peak_bytes / unit, _over_plain(whole_s, a)) for a in smaller]
    out.append(axes.path([(plain / unit, 1.0), *points], "blue"))
    for one, point in zip(smaller, points, strict=True):
        hint = f"{format_bytes(one.outcome.peak_bytes)}, {point[1]:.3f}x: {policy_counts(keeping, one)}"
        out.append(axes.point(*point, "blue", hint=hint))
    out.append(axes.point(plain / unit, 1.0, "grey", size=6, hint="plain training"))
    if chosen is not None:
        where = (chosen.outcome.peak_bytes if chosen.policy else plain) / unit, _over_plain(whole_s, chosen)
        out.append(axes.point(*where, "orange", size=6, hint="this plan"))
        entries.append(("orange", f"this plan, {where[1]:.2f}x"))
    if tiles is not None:
        out.append(axes.point(tiles[0] / unit, in_tiles[0], "orange", size=6, hint="this plan, in tiles"))
        entries.append(("orange", f"this plan, in tiles, {in_tiles[0]:.2f}x"))
    entries += [entry for _, _, entry in marks]
    drawn, end = legend(entries, _LEFT, _HEIGHT - 16, _WIDTH - _LEFT - 8)
    return document(_WIDTH, end + 6, [*out, *drawn])


def _over_plain(plain_s: float, one: Assignment) -> float:
    return 1 + one.outcome.extra_s / max(plain_s, 1e-12)
