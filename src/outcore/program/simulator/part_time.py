"""How long a forward or backward takes that several ranks compute together, each on its part of the image.

A `PartScript` is what all of them do, in order: compute, send borders, wait for what others sent. It is followed on all
ranks at once, each with a clock of its own: computing moves a rank's clock on, messages start when their sender reaches
them and take their place on the links, and a wait moves a rank's clock to the arrival of the last message that it
needs. What stands between a send and its wait overlaps with the messages, as it does when it runs. A message keeps the
hosts at its ends from computing for a while: the sender when it is sent, the receiver when it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from outcore.program.instructions import Backward, Compute, Forward
from outcore.program.simulator.links import LinkSchedule
from outcore.program.timeline import COMPUTE, Event


@dataclass(frozen=True, slots=True)
class PartCompute:
    """Compute on the own part."""

    seconds: tuple[float, ...]
    """By rank of the grid."""


@dataclass(frozen=True, slots=True)
class PartSend:
    """Start the messages of a value, or of a sum over all ranks."""

    value: str
    messages: tuple[tuple[int, int, int], ...]
    """Source, target, bytes."""
    host_s: float = 0.0
    """What a message takes of the host at either end, where the link does not say more."""


@dataclass(frozen=True, slots=True)
class PartWait:
    """Continue when all messages of that name for this rank are there."""

    value: str


PartScript: TypeAlias = tuple[PartCompute | PartSend | PartWait, ...]


@dataclass(frozen=True, slots=True)
class PartBytes:
    """What one micro-batch takes on one rank, beside parameters and optimizer state."""

    held: int = 0
    """From the end of the forward to the backward."""
    forward_peak: int = 0
    peak: int = 0
    """With the gradients of parameters that backward has made by then."""

    def scaled(self, fraction: float) -> PartBytes:
        """The same for a part of the batch, as if gradients of parameters shrank with it."""
        held, forward, most = (round(n * fraction) for n in (self.held, self.forward_peak, self.peak))
        return PartBytes(held, forward, most)


@dataclass(frozen=True, slots=True)
class SplitStageCosts:
    """The first stage on a grid of ranks, for one micro-batch."""

    forward: PartScript
    backward: PartScript
    memory: tuple[PartBytes, ...]
    """By rank of the grid."""

    @property
    def parts(self) -> int:
        """Ranks of the grid."""
        return len(self.memory)


def perform_parts(
    script: PartScript,
    instruction: Compute,
    ranks: Sequence[int],
    start_s: Sequence[float],
    traffic: LinkSchedule,
    events: list[Event],
) -> list[float]:
    """Add the events of a compute that these ranks do together; returns when it ends on each.

    Args:
        script: what they do.
        instruction: the forward or backward.
        ranks: those of the grid, in its order.
        start_s: when each of them begins.
        traffic: the links.
        events: where they are added.
    """
    kind = "forward" if isinstance(instruction, Forward) else "backward"
    labels = (instruction.stage, instruction.micro_batch, instruction.replica)
    clock, begun = list(start_s), list(start_s)
    arrivals: dict[str, list[float]] = {}
    received_s: dict[str, list[float]] = {}

    def computed(k: int) -> None:
        if clock[k] > begun[k]:
            events.append(Event(ranks[k], COMPUTE, kind, str(instruction), begun[k], clock[k], *labels))

    def occupy(k: int, seconds: float) -> None:
        """Keep a rank's processor busy, once it has one."""
        if not seconds:
            return
        start = traffic.begin(ranks[k], clock[k])
        if start > clock[k]:
            computed(k)
            begun[k] = start
        clock[k] = start + seconds
        traffic.finish(ranks[k], clock[k])

    for action in script:
        if isinstance(action, PartCompute):
            for k in sorted(range(len(ranks)), key=lambda k: clock[k]):
                occupy(k, action.seconds[k])
        elif isinstance(action, PartSend):
            due = arrivals.setdefault(action.value, [0.0] * len(ranks))
            hosts = received_s.setdefault(action.value, [0.0] * len(ranks))
            for source, target, nbytes in sorted(action.messages, key=lambda m: clock[m[0]]):
                host_s = max(action.host_s, traffic.links.host_s(ranks[source], ranks[target]))
                occupy(source, host_s)
                hosts[target] += host_s
                start, end, arrival = traffic.transfer(ranks[source], ranks[target], nbytes, clock[source])
                due[target] = max(due[target], arrival)
                there, here = f"halo→{ranks[target]}", f"halo←{ranks[source]}"
                events.append(Event(ranks[source], "send", "halo", there, start, end, *labels, nbytes))
                events.append(Event(ranks[target], "receive", "halo", here, start, arrival, *labels, nbytes))
        else:
            hosts = received_s.pop(action.value, [])
            for k, arrival in enumerate(arrivals.pop(action.value, ())):
                if arrival > clock[k]:
                    computed(k)
                    clock[k] = begun[k] = arrival
                occupy(k, hosts[k])
    for k in range(len(ranks)):
        computed(k)
    return clock


def script_of(costs: SplitStageCosts, instruction: Compute) -> PartScript:
    """What the ranks do in a forward or a backward."""
    return costs.backward if isinstance(instruction, Backward) else costs.forward
