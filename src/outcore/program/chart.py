"""A timeline as a static SVG: a lane per rank with what it computes, its network below, its memory behind a thin line.

Everything has a class, so a page may restyle it; every bar carries its name and times as a tooltip.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from outcore.machine.units import format_bytes, format_time
from outcore.program.ledger import Curve
from outcore.program.timeline import COMPUTE, Event, Timeline

__all__ = ["chart"]

LANE, BAR, WIRE, MEMORY = 40, 16, 4, 14
LEFT, TOP, RIGHT = 64, 44, 84
SHOWN_RANKS = 64
STYLE = """
text{font-family:Helvetica,Arial,sans-serif;font-size:11px;fill:#1f2830}
.title{font-size:13px;font-weight:bold}.small{font-size:10px;fill:#66717b}.mark{font-size:9px;text-anchor:middle}
.bar{stroke:#ffffff;stroke-width:.6}.forward{fill:#9cc4e8}.backward{fill:#f3bf8a}.second.forward{fill:#4d82b5}.second.backward{fill:#cc8637}
.step{fill:#7fc08a}.script{fill:#c7b8e6}.network{fill:#87929a}.copy{fill:#c05a79}
.lane{fill:#f4f6f7}.memory{fill:#dfe5e9;stroke:#87929a;stroke-width:.6}
"""


def chart(timeline: Timeline, *, width: int = 960, ranks: int = SHOWN_RANKS) -> str:
    """Draw the first `ranks` ranks of a timeline as SVG."""
    count = min(len(timeline), ranks)
    height = TOP + count * LANE + 28
    scale = (width - LEFT - RIGHT) / timeline.step_s if timeline.step_s else 0.0
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text class="title" x="8" y="18">{escape(timeline.name)}</text>',
        f'<text class="small" x="8" y="34">step {format_time(timeline.step_s)}, bubble {timeline.bubble:.1%}</text>',
    ]
    highest = max(timeline.peak_bytes, default=0)
    firsts = _first_replicas(timeline)
    for rank in range(count):
        top, curve = TOP + rank * LANE, timeline.memory[rank]
        out.append(f'<text x="8" y="{top + 12}">rank {rank}</text>')
        out.append(f'<rect class="lane" x="{LEFT}" y="{top}" width="{width - LEFT - RIGHT}" height="{BAR + WIRE}"/>')
        out.append(_memory(curve, top + BAR + WIRE + MEMORY, scale, timeline.step_s, highest))
        out.append(
            f'<text class="small" x="{width - RIGHT + 6}" y="{top + 30}">{format_bytes(curve.peak_bytes)}</text>'
        )
    for event in timeline.events:
        if event.rank < count and event.end_s > event.start_s:
            out.extend(_bar(event, scale, event.replica > firsts.get(event.rank, 0)))
    if count < len(timeline):
        out.append(f'<text class="small" x="8" y="{height - 8}">first {count} of {len(timeline):,} ranks</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _first_replicas(timeline: Timeline) -> dict[int, int]:
    firsts: dict[int, int] = {}
    for event in timeline.events:
        if event.stream == COMPUTE:
            firsts[event.rank] = min(event.replica, firsts.get(event.rank, event.replica))
    return firsts


def _bar(event: Event, scale: float, second: bool) -> Iterator[str]:
    x, wide = LEFT + event.start_s * scale, (event.end_s - event.start_s) * scale
    top = TOP + event.rank * LANE
    times = f"{format_time(event.start_s)} to {format_time(event.end_s)}"
    tip = f"<title>{escape(event.name)} ({event.stream}), {times}</title>"
    if event.stream != COMPUTE:
        kind, y, high = ("copy" if event.stream.startswith("copy") else "network"), top + BAR, WIRE
    else:
        kind = event.kind if event.kind in ("forward", "backward", "step") else "script"
        kind, y, high = f"bar {kind}", top, BAR
    kind = f"second {kind}" if second else kind
    yield f'<rect class="{kind}" x="{x:.2f}" y="{y}" width="{max(wide, 0.3):.2f}" height="{high}">{tip}</rect>'
    if event.stream == COMPUTE and wide > 6 + 5 * len(str(event.micro_batch)) and event.micro_batch >= 0:
        yield f'<text class="mark" x="{x + wide / 2:.2f}" y="{top + 11.5}">{event.micro_batch}</text>'


def _memory(curve: Curve, floor: float, scale: float, step_s: float, highest: int) -> str:
    """The memory of a rank, as high as its share of the highest peak of all."""
    points, level = [f"{LEFT},{floor}"], floor
    for time_s, held in zip(curve.times_s, curve.bytes, strict=True):
        x = LEFT + min(time_s, step_s) * scale
        points.append(f"{x:.2f},{level:.2f}")
        level = floor - MEMORY * held / highest if highest else floor
        points.append(f"{x:.2f},{level:.2f}")
    end = LEFT + step_s * scale
    return f'<polygon class="memory" points="{" ".join([*points, f"{end:.2f},{level:.2f}", f"{end:.2f},{floor}"])}"/>'
