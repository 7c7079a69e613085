"""A profile as a picture: what a step is made of, which blocks its time goes to, and what its memory is for.

Three panels, each with an axis of its own. The step: forward, backward, the optimizer and what the device waits for the
host, to scale. Below it forward and backward taken apart as an icicle: every row takes the blocks above it apart, and a
block is as wide as the time its calls take. Colours say the kind of layer and nothing else. Then the memory at the
peak, a bar for each use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from outcore.cost.costs import CallCost
from outcore.cost.profile import Profile
from outcore.figure import SMALL, WIDE, Span, bytes_unit, document, legend, line, rectangle, text, time_unit
from outcore.graph.parts import ancestors
from outcore.machine import format_bytes, format_time
from outcore.ops.registry import kinds
from outcore.report.profile import source_in_words

__all__ = ["profile_svg"]

_WIDTH, _ROW, _SIDE = 760, 24, 14
_INSIDE = _WIDTH - 2 * _SIDE
_KINDS = {
    "convolution": "sky",
    "linear": "orange",
    "attention": "vermillion",
    "norm": "green",
    "pooling": "purple",
    "activation": "yellow",
    "loss": "blue",
    "other": "grey",
}
_WORDS = {
    "conv": "convolution",
    "linear": "linear",
    "matmul": "linear",
    "attention": "attention",
    "norm": "norm",
    "pool": "pooling",
    "entropy": "loss",
    "loss": "loss",
    **dict.fromkeys((*kinds("activation", "gated activation", "softmax"), "swish"), "activation"),
}
_PHASES = {
    "forward": "#c3ccd3",
    "backward": "#a5b1ba",
    "optimizer": "#87949e",
    "transfer": "#6d7b86",
    "wait": "#eef1f3",
}


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
    facts = (
        f"step {format_time(profile.step.step_s)} ({source_in_words(profile)}), "
        f"{profile.per_second:,.1f} samples/s, peak {format_bytes(profile.memory.peak_bytes)} "
        f"of {format_bytes(profile.device.memory_bytes)}"
    )
    out = [text(_SIDE, 22, f"{profile.job}, batch {profile.size}, on {profile.device.name}", "title")]
    out.append(text(_SIDE, 40, facts, "small quiet"))
    end = 58.0
    for panel in (_step, lambda p, top: _blocks(p, top, depth), _memory):
        drawn, end = panel(profile, end)
        out += drawn
    return document(_WIDTH, end, out)


def _step(profile: Profile, top: float) -> tuple[list[str], float]:
    """The phases of a step, to scale."""
    out, left, scale, unnamed = [], float(_SIDE), _INSIDE / (profile.step.step_s or 1.0), []
    for name, fill in _PHASES.items():
        if seconds := getattr(profile.step, f"{name}_s"):
            said = "wait for the host" if name == "wait" else name
            out.append(rectangle(left, top, seconds * scale, _ROW, fill, f"{said}: {format_time(seconds)}"))
            named = _label(left, top, seconds * scale, f"{said} {format_time(seconds)}", said)
            unnamed += [] if named else [f"{said} {format_time(seconds)}"]
            out += named
            left += seconds * scale
    if unnamed:
        out.append(text(_SIDE + _INSIDE, top + _ROW + 33, f"at the end: {', '.join(unnamed)}", "small quiet end"))
    return [*out, *_axis(top + _ROW, profile.step.step_s, "time of a step")], top + _ROW + 52


def _blocks(profile: Profile, top: float, depth: int) -> tuple[list[str], float]:
    """Where the time of forward and backward goes."""
    bars = list(_bars(profile, depth))
    rows = 1 + max((bar.depth for bar in bars), default=0)
    whole = sum(cost.time_s for cost in profile.costs.calls.values()) or 1.0
    out, used = [], set()
    for bar in bars:
        block = profile.graph.blocks.get(bar.path)
        kind = _kind(block.type if block is not None else "")
        used |= {kind} if bar.leaf else set()
        name = bar.path.rpartition(".")[2]
        words = f"{bar.path}, {kind}: {format_time(bar.time_s)}, {bar.time_s / whole:.1%}"
        y = top + bar.depth * _ROW
        out.append(rectangle(bar.left, y, bar.width, _ROW - 1, _KINDS[kind] if bar.leaf else "light", words))
        out += _label(bar.left, y, bar.width, name)
    out += _axis(top + rows * _ROW, whole, "time of forward and backward")
    entries = [(colour, kind) for kind, colour in _KINDS.items() if kind in used]
    if any(not bar.leaf for bar in bars):
        entries.append(("light", "block that is taken apart below"))
    drawn, end = legend(entries, _SIDE, top + rows * _ROW + 58, _INSIDE)
    return [*out, *drawn], end + 22


def _bars(profile: Profile, most: int) -> Iterator[_Bar]:
    """Blocks row by row; children lie under their parent in the order of execution."""
    whole = sum(cost.time_s for cost in profile.costs.calls.values()) or 1.0
    scale = _INSIDE / whole

    def below(calls: list[CallCost], level: int, left: float) -> Iterator[_Bar]:
        groups: dict[str, list[CallCost]] = {}
        for cost in calls:
            around = [*ancestors(cost.block), cost.block]
            groups.setdefault(around[min(level, len(around)) - 1], []).append(cost)
        for path, group in groups.items():
            time_s = sum(cost.time_s for cost in group)
            leaf = level >= most or all(cost.block == path for cost in group)
            yield _Bar(path, left, time_s * scale, level - 1, time_s, leaf)
            if not leaf and time_s * scale > 1:
                yield from below(group, level + 1, left)
            left += time_s * scale

    yield from below(list(profile.costs.calls.values()), 1, _SIDE)


def _memory(profile: Profile, top: float) -> tuple[list[str], float]:
    """What the memory at the peak is for."""
    held = profile.memory.at_peak
    rows = [(f.name.replace("_", " "), getattr(held, f.name)) for f in fields(held) if getattr(held, f.name)]
    most = max((nbytes for _, nbytes in rows), default=1)
    beside, room = 130.0, _INSIDE - 130.0 - 80.0
    out = []
    for i, (name, nbytes) in enumerate(rows):
        y = top + 20 * i
        out.append(text(_SIDE + beside - 8, y + 13, name, "small end"))
        out.append(rectangle(_SIDE + beside, y, room * nbytes / most, 16, "#87949e", f"{name} {format_bytes(nbytes)}"))
        out.append(text(_SIDE + beside + room * nbytes / most + 6, y + 13, format_bytes(nbytes), "small"))
    below = top + 20 * len(rows)
    unit, words = bytes_unit(most)
    out += _axis(below, most / unit, f"memory at the peak ({words})", left=_SIDE + beside, room=room)
    return out, below + 44


def _axis(top: float, most: float, name: str, *, left: float = _SIDE, room: float = _INSIDE) -> list[str]:
    """A line with numbers; of seconds if the name has no unit."""
    if "(" not in name:
        unit, words = time_unit(most)
        most, name = most / unit, f"{name} ({words})"
    span = Span(0.0, most, name)
    out = [line(left, top, left + room, top, "axis"), text(left + room / 2, top + 33, name, "middle")]
    for value in span.ticks(8):
        px = left + room * span.share(value)
        out += [line(px, top, px, top + 4, "axis"), text(px, top + 17, f"{value:g}", "tick middle")]
    return out


def _label(left: float, top: float, width: float, *choices: str) -> list[str]:
    """The longest of several texts that fits into a bar."""
    fitting = [words for words in choices if WIDE * SMALL * len(words) + 6 <= width]
    return [text(left + 4, top + 16, fitting[0], "small")] if fitting else []


def _kind(type_: str) -> str:
    word = type_.lower()
    return next((kind for part, kind in _WORDS.items() if part in word), "other")
