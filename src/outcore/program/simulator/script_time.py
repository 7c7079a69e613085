"""How long one forward or backward takes, with or without a script of its values.

The script is walked in order: what computes moves the clock on, copies are started at the clock and end when the link
lets them, a wait or release moves the clock to the end of its copy. Memory follows the clock: what a `Run` saves is
held from its beginning; of what it holds beside that, as much as the next one holds too stays in between. A `Tile` is
a run in this; the maps of a `Pass` are held from its first tile on. A tile that is run again for its backward shows as
two events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outcore.program.instructions import Compute, Forward
from outcore.program.script import Action, Decode, Drop, Encode, Evict, Fetch, Pass, Recompute, Release, Run, Tile, Wait
from outcore.program.simulator.links import LinkSchedule
from outcore.program.stages import Stage
from outcore.program.timeline import COMPUTE, Event

Hold = Callable[[float, int], None]
"""Hold so many bytes more from that time on."""


@dataclass(frozen=True, slots=True)
class ScriptTiming:
    """One compute, about to begin."""

    rank: int
    instruction: Compute
    costs: Stage
    start_s: float
    evicted: dict[str, float]
    """When each value of this micro-batch that was evicted was gone."""

    def event(self, stream: str, kind: str, name: str, start_s: float, end_s: float, nbytes: int = 0) -> Event:
        """An event that belongs to it."""
        c = self.instruction
        return Event(self.rank, stream, kind, name, start_s, end_s, c.stage, c.micro_batch, c.replica, nbytes)


def perform(performance: ScriptTiming, traffic: LinkSchedule, events: list[Event], hold: Hold) -> float:
    """Add the events of a compute, and return when it ends."""
    instruction, costs = performance.instruction, performance.costs
    forward = isinstance(instruction, Forward)
    kind = "forward" if forward else "backward"
    whole_s = costs.forward_s if forward else costs.backward_s
    script = instruction.script
    if not any(isinstance(action, Run | Tile) for action in script):
        whole: Action = Run((), whole_s)
        script = (whole, *script) if forward else (*script, whole)
    now, ready, evicted = performance.start_s, dict[str, float](), performance.evicted
    beside = 0
    following = _bytes_of_next_run(script)
    for at, action in enumerate(script):
        if isinstance(action, Run | Pass):
            hold(now, action.saves)
        if isinstance(action, Run | Tile):
            hold(now, action.bytes - beside)
            beside = action.bytes
        if isinstance(action, Run | Tile | Recompute | Encode | Decode):
            if isinstance(action, Recompute | Decode):
                hold(now, action.bytes)
            end = now + action.time_s
            label = type(action).__name__.lower()
            if isinstance(action, Run):
                events.append(performance.event(COMPUTE, kind, str(instruction), now, end))
            elif isinstance(action, Tile):
                name = f"{action.name}, tile {action.index}"
                if action.again_s:
                    events.append(performance.event(COMPUTE, "recompute", name, now, now + action.again_s))
                back = "backward" if action.again_s else kind
                events.append(performance.event(COMPUTE, back, name, now + action.again_s, end))
            else:
                events.append(performance.event(COMPUTE, label, f"{label} {action.value}", now, end))
            now = end
            if isinstance(action, Run | Tile) and following[at] < beside:  # its workspace is free again
                hold(now, following[at] - beside)
                beside = following[at]
            if isinstance(action, Encode):
                hold(now, -action.bytes)
        elif isinstance(action, Evict):
            start, evicted[action.value] = traffic.copy(performance.rank, "away", action.bytes, now)
            if not action.released:
                hold(evicted[action.value], -action.bytes)
            copied = (start, evicted[action.value], action.bytes)
            events.append(performance.event("copy out", "evict", f"evict {action.value}", *copied))
        elif isinstance(action, Fetch):
            begin = max(now, evicted.get(action.value, now))
            start, ready[action.value] = traffic.copy(performance.rank, "back", action.bytes, begin)
            hold(start, action.bytes)
            copied = (start, ready[action.value], action.bytes)
            events.append(performance.event("copy in", "fetch", f"fetch {action.value}", *copied))
        elif isinstance(action, Wait):
            now = max(now, ready.get(action.value, now))
        elif isinstance(action, Release):
            now = max(now, evicted.get(action.value, now))
            hold(now, -action.bytes)
        elif isinstance(action, Drop):
            hold(now, -action.bytes)
    hold(now, -beside)
    return now


def _bytes_of_next_run(script: Sequence[Action]) -> list[int]:
    """For every action, what the next `Run` or `Tile` holds; nothing after the last."""
    found, following = [0] * len(script), 0
    for at in range(len(script) - 1, -1, -1):
        found[at] = following
        action = script[at]
        if isinstance(action, Run | Tile):
            following = action.bytes
    return found
