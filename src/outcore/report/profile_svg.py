"""A profile as a picture: where the time of a step goes, from the whole network down to its leaves.

An icicle: the top row is the step, every row below takes the blocks above apart, and a block is as wide as the time its
calls take, forward and backward. Colours say the kind of layer. Beside it, memory at the peak by what it is for. Hand
written, without a script, so that it can stand in any page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from html import escape

from outcore.cost.costs import CallCost
from outcore.cost.profile import Profile
from outcore.graph.parts import ROOT, ancestors
from outcore.machine import format_bytes, format_time

__all__ = ["profile_svg"]

_WIDTH, _ROW, _TOP, _SIDE = 1180, 24, 58, 12
_COLOURS = {
    "conv": "#4c78a8",
    "linear": "#f58518",
    "matmul": "#f58518",
    "attention": "#e45756",
    "norm": "#72b7b2",
    "pool": "#54a24b",
    "act": "#eeca3b",
    "loss": "#b279a2",
}
_GREY, _TRUNK = "#c9ced6", "#e6e9ee"
_MEMORY = ("#4c78a8", "#f58518", "#e45756", "#72b7b2", "#54a24b", "#eeca3b", "#b279a2")


@dataclass(frozen=True, slots=True)
class _Bar:
    path: str
    left: float
    width: float
    depth: int
    time_s: float
    leaf: bool


def profile_svg(profile: Profile, *, depth: int = 6) -> str:
    """The picture, as SVG text."""
    bars = list(_bars(profile, depth))
    rows = 1 + max((bar.depth for bar in bars), default=0)
    height = _TOP + rows * _ROW + 74
    title = f"{profile.job}, batch {profile.size}, on {profile.device.name}"
    facts = (
        f"step {format_time(profile.step.step_s)} ({profile.step.source}), "
        f"{profile.per_second:,.1f} samples/s, peak {format_bytes(profile.memory.peak_bytes)} "
        f"of {format_bytes(profile.device.memory_bytes)}"
    )
    body = [_text(_SIDE, 22, title, size=15, bold=True), _text(_SIDE, 42, facts, size=12)]
    body += [_drawn(bar, profile) for bar in bars]
    body += _memory(profile, _TOP + rows * _ROW + 20)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _bars(profile: Profile, most: int) -> Iterator[_Bar]:
    """Blocks row by row; children lie under their parent in the order of execution."""
    whole = sum(cost.time_s for cost in profile.costs.calls.values()) or 1.0
    scale = (_WIDTH - 2 * _SIDE) / whole

    def below(calls: list[CallCost], level: int, left: float) -> Iterator[_Bar]:
        groups: dict[str, list[CallCost]] = {}
        for cost in calls:
            line = [*ancestors(cost.block), cost.block]
            groups.setdefault(line[min(level, len(line)) - 1], []).append(cost)
        for path, group in groups.items():
            time_s = sum(cost.time_s for cost in group)
            leaf = level >= most or all(cost.block == path for cost in group)
            yield _Bar(path, left, time_s * scale, level, time_s, leaf)
            if not leaf and time_s * scale > 1:
                yield from below(group, level + 1, left)
            left += time_s * scale

    yield _Bar(ROOT, _SIDE, whole * scale, 0, whole, False)
    yield from below(list(profile.costs.calls.values()), 1, _SIDE)


def _drawn(bar: _Bar, profile: Profile) -> str:
    kind = profile.graph.blocks[bar.path].type if bar.path in profile.graph.blocks else ""
    name = bar.path.rpartition(".")[2] or "step"
    whole = profile.costs.total().time_s or 1.0
    hint = escape(f"{bar.path or 'whole network'} {kind}: {format_time(bar.time_s)}, {bar.time_s / whole:.1%}")
    y = _TOP + bar.depth * _ROW
    label = ""
    if bar.width > 7 * len(name) + 8:
        label = _text(bar.left + 4, y + 16, name, size=11)
    return (
        f'<g><title>{hint}</title><rect x="{bar.left:.2f}" y="{y}" width="{max(0.3, bar.width):.2f}" '
        f'height="{_ROW - 1}" fill="{_colour(kind) if bar.leaf else _TRUNK}" stroke="white" stroke-width="0.5"/>'
        f"{label}</g>"
    )


def _memory(profile: Profile, top: float) -> list[str]:
    """One bar: the peak by what it is for, against the capacity."""
    held, capacity = profile.memory.at_peak, profile.device.memory_bytes
    scale = (_WIDTH - 2 * _SIDE) / max(held.total, capacity, 1)
    drawn = [
        f'<rect x="{_SIDE}" y="{top}" width="{capacity * scale:.1f}" height="16" fill="none" stroke="#888"/>',
    ]
    left, words = float(_SIDE), []
    for field, colour in zip(fields(held), _MEMORY, strict=False):
        size = getattr(held, field.name)
        if size:
            name = field.name.replace("_", " ")
            drawn.append(
                f'<rect x="{left:.2f}" y="{top}" width="{size * scale:.2f}" height="16" fill="{colour}">'
                f"<title>{name} {format_bytes(size)}</title></rect>"
            )
            words.append(f'<tspan fill="{colour}">■</tspan> {name} {format_bytes(size)}')
            left += size * scale
    drawn.append(f'<text x="{_SIDE}" y="{top + 34}" font-size="11">memory at the peak: {"  ".join(words)}</text>')
    return drawn


def _colour(kind: str) -> str:
    word = kind.lower()
    if "relu" in word or "gelu" in word or "silu" in word or "swish" in word or "sigmoid" in word:
        return _COLOURS["act"]
    if "entropy" in word or "loss" in word:
        return _COLOURS["loss"]
    return next((colour for name, colour in _COLOURS.items() if name in word), _GREY)


def _text(x: float, y: float, words: str, *, size: int, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}"{weight} fill="#222">{escape(words)}</text>'
