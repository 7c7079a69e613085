"""A timeline as a static SVG: a lane per rank with what it computes, its network below, its memory under both.

The time axis is below the lanes, what the colours mean below that; both copies of a stage that a rank holds under GEMS
have different shades. A bar carries its name and times as a tooltip, and its micro-batch as a number where there
is room.
"""

from __future__ import annotations

from collections.abc import Iterator

from outcore.figure import COLOURS, Axes, Span, document, legend, line, rectangle, text, time_unit
from outcore.machine.units import format_bytes, format_time
from outcore.program.simulator.memory_curve import RankMemory
from outcore.program.timeline import COMPUTE, Event, Timeline

LANE, BAR, NETWORK, MEMORY = 52, 18, 5, 18
LEFT, TOP, RIGHT = 66, 56, 92
SHOWN_RANKS = 64
FILL = {
    "forward": "sky",
    "second forward": "blue",
    "backward": "orange",
    "second backward": "vermillion",
    "step": "green",
    "script": "purple",
    "network": "#4a5560",
    "copy": "yellow",
}
"""The colour of each kind of bar."""
MEANS = {
    "forward": "forward",
    "second forward": "forward, other copy",
    "backward": "backward",
    "second backward": "backward, other copy",
    "step": "optimizer's step",
    "script": "made again",
    "network": "network",
    "copy": "copy to or from the host",
}


def chart(timeline: Timeline, *, width: int = 720, ranks: int = SHOWN_RANKS) -> str:
    """Draw the first `ranks` ranks of a timeline as SVG."""
    count = min(len(timeline), ranks)
    below = TOP + count * LANE
    unit, words = time_unit(timeline.step_s)
    span = Span(0.0, max(timeline.step_s / unit, 1e-9), f"time ({words})")
    axes = Axes(LEFT, TOP, width - LEFT - RIGHT, count * LANE, span, Span(0.0, 1.0, ""))
    facts = f"step {format_time(timeline.step_s)}, ranks wait {timeline.bubble:.0%} of it (bubble)"
    numbered = len({event.micro_batch for event in timeline.events if event.micro_batch >= 0}) > 1
    facts += "; numbers are micro-batches" if numbered else ""
    out = [text(12, 20, timeline.name, "title"), text(12, 38, facts, "small quiet"), *_time_axis(axes, below)]
    highest = max(timeline.peak_bytes, default=0)
    for rank in range(count):
        top, curve = TOP + rank * LANE, timeline.memory[rank]
        out.append(text(12, top + 14, f"rank {rank}"))
        out.append(rectangle(LEFT, top, axes.width, BAR + NETWORK, "light"))
        if highest:  # of a step that was run, memory is known where it was counted
            out.append(_memory(curve, axes, unit, top + BAR + NETWORK + MEMORY + 2, timeline.step_s, highest))
            out.append(text(width - RIGHT + 7, top + BAR + NETWORK + MEMORY, format_bytes(curve.peak_bytes), "small"))
    used: dict[str, None] = {}
    firsts = _first_replicas(timeline)
    for event in timeline.events:
        if event.rank < count and event.end_s > event.start_s:
            kind = _kind(event, event.replica > firsts.get(event.rank, 0))
            used[kind] = None
            out.extend(_bar(event, kind, axes, unit, numbered))
    entries = [(FILL[kind], MEANS[kind]) for kind in FILL if kind in used]
    entries += [("light", "waiting"), *([("#b9c3cb", f"memory, of {format_bytes(highest)}")] if highest else [])]
    drawn, end = legend(entries, LEFT, below + 56, width - LEFT - 8)
    if count < len(timeline):
        drawn.append(text(LEFT, end + 12, f"first {count} of {len(timeline):,} ranks", "small quiet"))
        end += 18
    return document(width, end + 4, [*out, *drawn])


def _time_axis(axes: Axes, below: float) -> list[str]:
    out = [line(axes.left, below, axes.left + axes.width, below, "axis")]
    for value in axes.x.ticks(6):
        px, _ = axes.at(value, 0.0)
        out += [line(px, axes.top, px, below, "grid"), line(px, below, px, below + 4, "axis")]
        out.append(text(px, below + 17, f"{value:g}", "tick middle"))
    return [*out, text(axes.left + axes.width / 2, below + 34, axes.x.name, "middle")]


def _first_replicas(timeline: Timeline) -> dict[int, int]:
    firsts: dict[int, int] = {}
    for event in timeline.events:
        if event.stream == COMPUTE and event.kind in ("forward", "backward"):
            firsts[event.rank] = min(event.replica, firsts.get(event.rank, event.replica))
    return firsts


def _kind(event: Event, second: bool) -> str:
    if event.stream != COMPUTE:
        return "copy" if event.stream.startswith("copy") else "network"
    if event.kind in ("forward", "backward"):
        return f"second {event.kind}" if second else event.kind
    return "step" if event.kind == "step" else "script"


def _bar(event: Event, kind: str, axes: Axes, unit: float, numbered: bool) -> Iterator[str]:
    x, _ = axes.at(event.start_s / unit, 0.0)
    wide = axes.at(event.end_s / unit, 0.0)[0] - x
    top = TOP + event.rank * LANE
    times = f"{format_time(event.start_s)} to {format_time(event.end_s)}"
    y, high = (top, BAR) if event.stream == COMPUTE else (top + BAR, NETWORK)
    yield rectangle(x, y, wide, high, FILL[kind], f"{event.name} ({event.stream}), {times}")
    room = wide > 8 + 6 * len(str(event.micro_batch))
    if numbered and room and event.stream == COMPUTE and event.micro_batch >= 0:
        yield text(x + wide / 2, top + 13, str(event.micro_batch), "small middle")


def _memory(curve: RankMemory, axes: Axes, unit: float, floor: float, step_s: float, highest: int) -> str:
    """The memory of a rank, as high as its share of the highest peak of all."""
    points, level = [f"{axes.left},{floor}"], floor
    for time_s, held in zip(curve.times_s, curve.bytes, strict=True):
        x, _ = axes.at(min(time_s, step_s) / unit, 0.0)
        points.append(f"{x:.2f},{level:.2f}")
        level = floor - MEMORY * held / highest
        points.append(f"{x:.2f},{level:.2f}")
    end, _ = axes.at(step_s / unit, 0.0)
    outline = " ".join([*points, f"{end:.2f},{level:.2f}", f"{end:.2f},{floor}"])
    return f'<polygon class="memory" fill="#b9c3cb" stroke="{COLOURS["grey"]}" stroke-width=".6" points="{outline}"/>'
