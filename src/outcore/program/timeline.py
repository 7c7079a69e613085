"""A timeline: what happened, or would happen, in one training step.

The simulator makes one from a program and its costs, the engine one from what it measured; both look the same, so
they can be put side by side. It prints as a small table per rank, saves to JSON and compares.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from outcore.documents.reading import read_json
from outcore.documents.schema import Anything, ListOf, MapOf, Record, Text, check
from outcore.documents.typed_schema import schema_of
from outcore.errors import ProgramError
from outcore.machine.units import format_bytes, format_time
from outcore.notebook import html_of
from outcore.program.simulator.memory_curve import CURVE, RankMemory

VERSION = 1
"""Version of the JSON document."""

COMPUTE = "compute"
NETWORK = ("send", "receive", "reduce")
STREAMS = (COMPUTE, *NETWORK, "copy out", "copy in")
"""What a rank can do at the same time."""

PRINTED_RANKS = 32


class Event(NamedTuple):
    """Something that took time on one stream of one rank."""

    rank: int
    stream: str
    kind: str
    """forward, backward, step, send, receive, reduce, or the name of a script's action."""
    name: str
    start_s: float
    end_s: float
    stage: int = -1
    micro_batch: int = -1
    replica: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of one step, and the memory of each rank."""

    name: str
    events: tuple[Event, ...]
    memory: tuple[RankMemory, ...]
    """One for each rank."""

    def __len__(self) -> int:
        return len(self.memory)

    @property
    def step_s(self) -> float:
        """From the beginning of the step, at 0, to the end of its last event."""
        return max((event.end_s for event in self.events), default=0.0)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most memory each rank holds."""
        return tuple(curve.peak_bytes for curve in self.memory)

    def busy_s(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return self._covered((COMPUTE,))

    def idle_s(self) -> tuple[float, ...]:
        """How long each rank does not compute."""
        return tuple(self.step_s - busy for busy in self.busy_s())

    def communication_s(self) -> tuple[float, ...]:
        """How long each rank sends, receives or reduces, whether it computes meanwhile or not."""
        return self._covered(NETWORK)

    def exposed_s(self) -> tuple[float, ...]:
        """How long each rank communicates and does not compute."""
        both = self._covered((COMPUTE, *NETWORK))
        return tuple(all_s - busy for all_s, busy in zip(both, self.busy_s(), strict=True))

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which nothing is computed."""
        return 1 - sum(self.busy_s()) / (len(self) * self.step_s) if self.step_s else 0.0

    def _covered(self, streams: Iterable[str]) -> tuple[float, ...]:
        """For each rank, the length of the union of its events on some streams."""
        wanted = set(streams)
        covered, until = [0.0] * len(self), [0.0] * len(self)
        for event in sorted((e for e in self.events if e.stream in wanted), key=lambda e: e.start_s):
            begin = max(event.start_s, until[event.rank])
            if event.end_s > begin:
                covered[event.rank] += event.end_s - begin
                until[event.rank] = event.end_s
        return tuple(covered)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_of(self)

    def __str__(self) -> str:
        lines = [f"{self.name}: step {format_time(self.step_s)}, bubble {self.bubble:.1%}, {len(self)} ranks"]
        lines.append(f"{'rank':>5} {'busy':>9} {'idle':>9} {'network':>9} {'exposed':>9} {'peak':>10}  of which saved")
        rows = zip(self.busy_s(), self.idle_s(), self.communication_s(), self.exposed_s(), self.memory, strict=True)
        for rank, (busy, idle, network, exposed, curve) in enumerate(rows):
            if rank == PRINTED_RANKS:
                lines.append(f"… {len(self) - rank:,} more ranks")
                break
            times = " ".join(f"{format_time(t):>9}" for t in (busy, idle, network, exposed))
            saved = format_bytes(curve.parts()["saved"])
            lines.append(f"{rank:>5} {times} {format_bytes(curve.peak_bytes):>10}  {saved}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The timeline as plain lists, dictionaries, strings and numbers."""
        return {
            "version": VERSION,
            "name": self.name,
            "fields": list(Event._fields),
            "events": [list(event) for event in self.events],
            "memory": [curve.to_json() for curve in self.memory],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str | Path = "a timeline") -> Timeline:
        """The timeline that `to_json` wrote."""
        if check(data, MapOf(), source, ProgramError).get("version") != VERSION:
            raise ProgramError(f"{source}: version is {data.get('version')!r}; this outcore reads {VERSION}")
        check(data, _document(), source, ProgramError)
        events = tuple(Event(*row) for row in data["events"])
        return cls(data["name"], events, tuple(RankMemory.from_json(row) for row in data["memory"]))

    def save(self, path: str | Path) -> None:
        """Write the timeline as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read a timeline written by `save`."""
        return cls.from_json(read_json(path, MapOf(), ProgramError), path)


@functools.cache
def _document() -> Record:
    """What a saved timeline holds."""
    needed = {"name": Text(), "events": ListOf(schema_of(Event)), "memory": ListOf(CURVE)}
    return Record({"version": Anything(), **needed}, open=True)
