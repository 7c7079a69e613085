"""Scaling as a picture: samples per second over the number of GPUs, and where a step's time goes."""

from __future__ import annotations

import itertools

from outcore.figure import DASHES, Axes, Span, document, legend, line, rectangle, text, time_unit
from outcore.whatif.scaling_table import ScalingTable

__all__ = ["scaling_svg"]

_COLOURS = {"data_parallel": "blue", "sharded": "orange", "gpipe": "green", "1f1b": "purple", "gems": "vermillion"}
_WORDS = {
    "data_parallel": "data parallel",
    "sharded": "sharded (FSDP)",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "gems": "GEMS",
}
_WIDTH = 860
_TOP, _TALL = 62, 240


def scaling_svg(found: ScalingTable) -> str:
    """Two panels: throughput of every way with its interval, beside the ideal; and what a data parallel step does."""
    body = [text(24, 26, f"{found.job} on {found.device} over {found.link}, {found.mode} scaling", "title")]
    left, seen = _throughput(found)
    body += left + _where(found)
    entries = [(_COLOURS[s], _WORDS[s]) for s in seen] + [("light", "ideal")]
    below = _TOP + _TALL + 62
    drawn, end = legend(entries, 78, below, 340)
    shares, _ = legend([("sky", "compute"), ("vermillion", "waiting for the link")], 500, below, 330)
    return document(_WIDTH, end + 6, [*body, *drawn, *shares])


def _throughput(found: ScalingTable) -> tuple[list[str], list[str]]:
    counts = sorted({p.gpus for p in found.points})
    most = max(p.samples_per_s for p in found.points)
    one = next(p for p in found.points if p.gpus == counts[0])
    ideal = [(n, one.samples_per_s / one.gpus * n) for n in counts]
    low = min(min(p.batch / p.interval_s[1] for p in found.points), ideal[0][1])
    high = max(most, ideal[-1][1])
    wide = len(counts) > 1 and counts[-1] > 8
    x = Span(counts[0] * (0.9 if wide else 1), counts[-1] * (1.1 if wide else 1), "GPUs", wide, _apart(counts, wide))
    y = Span(low * 0.8 if wide else 0.0, high * 1.1, "samples per second", log=wide)
    axes = Axes(78, _TOP, 320, _TALL, x, y)
    out = [*axes.drawn(), axes.path(ideal, "light", width=7)]
    out.append(text(78, _TOP - 8, "upright lines: four steps in five lie there", "small quiet"))
    seen = [s for s in _COLOURS if found.of(s)]
    for strategy, dash in zip(seen, itertools.cycle(DASHES), strict=False):
        points = found.of(strategy)
        out.append(axes.path([(p.gpus, p.samples_per_s) for p in points], _COLOURS[strategy], width=2, dash=dash))
        for p in points:
            low, high = (p.batch / step_s for step_s in reversed(p.interval_s))
            out.append(axes.path([(p.gpus, low), (p.gpus, high)], _COLOURS[strategy], width=1))
            hint = f"{p.gpus} GPUs: {p.samples_per_s:,.0f} samples/s ({low:,.0f} to {high:,.0f}), {p.efficiency:.0%}"
            out.append(axes.point(p.gpus, p.samples_per_s, _COLOURS[strategy], hint=hint))
    return out, seen


def _where(found: ScalingTable) -> list[str]:
    points = found.of("data_parallel") or found.of(found.points[0].strategy)
    factor, unit = time_unit(max(p.step_s for p in points))
    most = max(p.step_s for p in points) / factor
    axes = Axes(500, _TOP, 320, _TALL, Span(0, len(points), ""), Span(0, most * 1.1, ""))
    below = _TOP + _TALL
    out = [line(500, below, 820, below, "axis")]
    for value in axes.y.ticks():
        _, py = axes.at(0, value)
        out += [line(500, py, 820, py, "grid"), text(494, py + 4, f"{value:g}", "tick end")]
    out.append(
        text(
            500,
            _TOP - 8,
            f"time of a step ({unit})" + (", data parallel" if found.of("data_parallel") else ""),
            "small quiet",
        )
    )
    width = 320 / len(points)
    for number, p in enumerate(points):
        waits = p.exposed_s / factor
        works = p.step_s / factor - waits
        left = 500 + width * (number + 0.18)
        for base, height, colour, word in ((0.0, works, "sky", "compute"), (works, waits, "vermillion", "waiting")):
            if height <= 0:
                continue
            _, upper = axes.at(0, base + height)
            _, lower = axes.at(0, base)
            hint = f"{p.gpus} GPUs: {word} {height:.3g} {unit}"
            out.append(rectangle(left, upper, width * 0.64, round(lower - upper, 1), colour, hint))
        out.append(text(left + width * 0.32, below + 17, f"{p.gpus:,}", "tick middle"))
    out.append(text(660, below + 36, "GPUs", "middle"))
    return out


def _apart(counts: list[int], log: bool) -> tuple[float, ...]:
    """Of the numbers of GPUs those whose ticks do not touch."""
    kept: list[float] = []
    for n in counts:
        share = Span(counts[0], counts[-1], "", log).share
        if not kept or 320 * (share(n) - share(kept[-1])) > 34:
            kept.append(float(n))
    return tuple(kept)
