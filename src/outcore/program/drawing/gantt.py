"""A timeline in the terminal: one line per rank, one column per moment.

A digit is the forward of that micro-batch, a letter its backward (a for 0), `U` an optimizer step, `r` recomputing and
other work of scripts, `-` the network without computing, `.` nothing. Numbers start again after 9 and z. On a colour
terminal the second replica of a rank has colours of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from rich.text import Text

from outcore.machine.units import format_bytes, format_time
from outcore.program.timeline import COMPUTE, NETWORK, Event, Timeline

SHOWN_RANKS = 24
LEGEND = "0 forward of micro-batch 0, a its backward, {scripts}U step, - network only, . idle"
SCRIPTS = "r made again or encoded, "
"""In the legend, of timelines that have it."""
COLOURS = {"forward": ("cyan", "blue"), "backward": ("yellow", "red"), "step": ("green", "green")}

Cell = tuple[str, str]
"""A character and its colour."""


def rich_gantt(timeline: Timeline, *, width: int = 80, columns: int | None = None, ranks: int = SHOWN_RANKS) -> Text:
    """The timeline as coloured text for a rich console; its `plain` is the text without colours.

    Args:
        timeline: what to draw.
        width: of the whole picture.
        columns: of the drawing alone; one column per unit of time makes a drawing without rounding.
        ranks: how many at most; more are thinned out evenly.
    """
    text = Text()
    for line in _lines(timeline, width, columns, ranks):
        for character, colour in line:
            text.append(character, colour or None)
        text.append("\n")
    return text


def _lines(timeline: Timeline, width: int, columns: int | None, ranks: int) -> Iterator[list[Cell]]:
    count = len(timeline)
    shown = range(count) if count <= ranks else sorted({round(i * (count - 1) / (ranks - 1)) for i in range(ranks)})
    label = len(f"rank {count - 1}")
    columns = columns or max(8, width - label - len("   100 %  1023.9 MiB"))
    title = f"{timeline.name}: step {format_time(timeline.step_s)}, bubble {timeline.bubble:.0%}"
    yield [(c, "") for c in title]
    if len(shown) < count:
        yield [(c, "") for c in f"{len(shown)} of {count:,} ranks"]
    busy_s, counted = timeline.busy_s(), any(timeline.peak_bytes)
    by_rank: dict[int, list[Event]] = {rank: [] for rank in shown}
    for event in timeline.events:
        if event.rank in by_rank:
            by_rank[event.rank].append(event)
    for rank in shown:
        share = busy_s[rank] / timeline.step_s if timeline.step_s else 0.0
        after = f"  {share:>4.0%}  {format_bytes(timeline.memory[rank].peak_bytes) if counted else ''}".rstrip()
        yield [
            *((c, "") for c in f"rank {rank}".ljust(label) + "  "),
            *_cells(by_rank[rank], columns, timeline.step_s),
            *((c, "") for c in after),
        ]
    scripted = any(e.stream == COMPUTE and e.kind not in COLOURS for e in timeline.events)
    yield [(c, "dim") for c in LEGEND.format(scripts=SCRIPTS if scripted else "")]


def _cells(events: Sequence[Event], columns: int, step_s: float) -> Iterator[Cell]:
    """What happens in the middle of each column."""
    computing = sorted((e for e in events if e.stream == COMPUTE and e.end_s > e.start_s), key=lambda e: e.start_s)
    network = sorted((e for e in events if e.stream in NETWORK and e.end_s > e.start_s), key=lambda e: e.start_s)
    starts = [e.start_s for e in computing]
    first = min((e.replica for e in computing), default=0)
    for column in range(columns):
        at = (column + 0.5) * step_s / columns
        index = bisect_right(starts, at) - 1
        if index >= 0 and computing[index].end_s > at:
            yield _cell(computing[index], first)
        elif any(e.start_s <= at < e.end_s for e in network):
            yield "-", "dim"
        else:
            yield ".", "dim"


def _cell(event: Event, first_replica: int) -> Cell:
    colour = COLOURS.get(event.kind, ("magenta", "magenta"))[event.replica > first_replica]
    match event.kind:
        case "forward":
            return str(event.micro_batch % 10), colour
        case "backward":
            return chr(ord("a") + event.micro_batch % 26), colour
        case "step":
            return "U", colour
    return "r", colour
