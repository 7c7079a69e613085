"""A timeline as a trace for Perfetto or chrome://tracing.

A rank is a process, a stream is a thread, memory is a counter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outcore.documents.reading import read_json, write_text
from outcore.documents.schema import ListOf, MapOf, Record
from outcore.errors import ProgramError
from outcore.program.simulator.memory_curve import PARTS, RankMemory
from outcore.program.timeline import STREAMS, Event, Timeline

MICROSECONDS = 1e6


def trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the trace event format; times are in microseconds."""
    rows: list[dict[str, Any]] = []
    used = {(event.rank, event.stream) for event in timeline.events}
    threads = {stream: number for number, stream in enumerate(STREAMS)}
    for rank in range(len(timeline)):
        rows.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        rows.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for stream, number in threads.items():
            if (rank, stream) in used:
                rows.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": stream}})
    for event in timeline.events:
        rows.append(
            {
                "ph": "X",
                "name": event.name,
                "cat": event.kind,
                "pid": event.rank,
                "tid": threads[event.stream],
                "ts": event.start_s * MICROSECONDS,
                "dur": (event.end_s - event.start_s) * MICROSECONDS,
                "args": {
                    "stage": event.stage,
                    "micro_batch": event.micro_batch,
                    "replica": event.replica,
                    "bytes": event.bytes,
                },
            }
        )
    for rank, curve in enumerate(timeline.memory):
        for time_s, held in zip(curve.times_s, curve.bytes, strict=True):
            counter = {"ph": "C", "name": "memory", "pid": rank, "ts": time_s * MICROSECONDS, "args": {"bytes": held}}
            rows.append(counter)
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"name": timeline.name}}


def save_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace; open it at ui.perfetto.dev."""
    write_text(path, json.dumps(trace(timeline), ensure_ascii=False))


def load_trace(path: str | Path) -> Timeline:
    """The timeline of a trace that `save_trace` wrote; what the peak of its memory consists of is not in it.

    Raises:
        ProgramError: the file is not such a trace.
    """
    found = read_json(path, Record({"traceEvents": ListOf(MapOf())}, open=True), ProgramError)
    events: list[Event] = []
    held: dict[int, list[tuple[float, int]]] = {}
    try:
        for row in found["traceEvents"]:
            rank, start = int(row["pid"]), float(row.get("ts", 0.0)) / MICROSECONDS
            if row["ph"] == "M":
                held.setdefault(rank, [])
            elif row["ph"] == "C":
                held.setdefault(rank, []).append((start, int(row["args"]["bytes"])))
            elif row["ph"] == "X":
                end, of = start + float(row["dur"]) / MICROSECONDS, row["args"]
                places = (of["stage"], of["micro_batch"], of["replica"], of["bytes"])
                events.append(Event(rank, STREAMS[row["tid"]], row["cat"], row["name"], start, end, *places))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ProgramError(f"{path} is no trace of a timeline: {error!r}") from None
    curves = []
    for rank in range(max(held, default=-1) + 1):
        points = held.get(rank, [])
        peak_s, peak = max(points, key=lambda point: point[1], default=(0.0, 0))
        times, sizes = tuple(t for t, _ in points), tuple(b for _, b in points)
        curves.append(RankMemory(times, sizes, peak, peak_s, (0,) * len(PARTS)))
    return Timeline(str(found.get("otherData", {}).get("name", "")), tuple(events), tuple(curves))
