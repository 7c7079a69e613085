"""A timeline as a trace for Perfetto or chrome://tracing.

A rank is a process, a stream is a thread, memory is a counter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outcore.program.timeline import STREAMS, Timeline

__all__ = ["save_trace", "trace"]

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
    Path(path).write_text(json.dumps(trace(timeline), ensure_ascii=False), encoding="utf-8")
