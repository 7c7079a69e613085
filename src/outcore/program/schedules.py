"""Schedules: in which order a rank computes.

A schedule is a generator: for one rank of a pipeline of `depth` stages it yields forwards and backwards. Sends,
receives, reductions and optimizer steps follow from the order and are inserted by `compile.py`. In the timelines a
digit is the forward of that micro-batch, a letter its backward (a for 0, two columns wide: B = 2F), a dot is idle.

A step consists of `batches` batches of `micro_batches` micro-batches each, before one reduction and one optimizer
step. Micro-batches are numbered through the step. In every schedule each stage takes them in ascending order, forward
and backward: gradients add up in the order in which one device would add them, and transfers keep their order on
every link.

GEMS: Jain et al., SC 2020. GPipe: Huang et al., NeurIPS 2019. 1F1B: Narayanan et al., SOSP 2019 (PipeDream), here
with a flush, as in Fan et al., PPoPP 2021 (DAPPLE).

Several stages may share a rank (`merge_orders`). A named schedule knows one stage per rank. If stages share ranks, the
pipeline is first simulated as if each had its own; then the orders of the stages that share a rank are merged by the
time at which each compute began. One clock orders all ranks, so whatever a compute waits for stands before it
everywhere, and there is no deadlock.

    stages on ranks 0 1 2 1 0, model parallel     rank 0  F0 F4 B4 B0
                                                  rank 1  F1 F3 B3 B1
                                                  rank 2  F2 B2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from outcore.errors import ProgramError
from outcore.program.instructions import Backward, Compute, Forward
from outcore.program.stages import Stages


class Generator(Protocol):
    """What makes the order of one rank."""

    def __call__(self, rank: int, depth: int, micro_batches: int, batches: int) -> Iterator[Compute]:
        """The forwards and backwards of `rank`."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A named order of computing."""

    name: str
    order: Generator
    replicas: int = 1
    """Copies of the network on one set of ranks."""
    batches: int | None = None
    """The only number of batches it takes, if there is one."""


def model_parallel(rank: int, depth: int, micro_batches: int, batches: int) -> Iterator[Compute]:
    """One micro-batch at a time through all stages and back.

    rank 0  0.........aa1.........bb    time 3·D·m (D = 4, m = 2)
    rank 1  .0......aa...1......bb..    in flight: 1 on each rank
    rank 2  ..0...aa......1...bb....
    rank 3  ...0aa.........1bb......
    """
    for micro_batch in range(micro_batches * batches):
        yield Forward(rank, micro_batch)
        yield Backward(rank, micro_batch)


def gpipe(rank: int, depth: int, micro_batches: int, batches: int) -> Iterator[Compute]:
    """All forwards of a batch, then all its backwards.

    rank 0  012......aabbcc    time 3·(m + D - 1) (D = 3, m = 3)
    rank 1  .012...aabbcc..    in flight: m on each rank
    rank 2  ..012aabbcc....
    """
    for batch in range(batches):
        numbers = range(batch * micro_batches, (batch + 1) * micro_batches)
        yield from (Forward(rank, number) for number in numbers)
        yield from (Backward(rank, number) for number in numbers)


def one_f_one_b(rank: int, depth: int, micro_batches: int, batches: int) -> Iterator[Compute]:
    """As many forwards as the pipeline is deep below, then a forward and a backward in turn.

    rank 0  012....aa3bb.cc.dd    time 3·(m + D - 1) (D = 3, m = 4)
    rank 1  .01..aa2bb3cc.dd..    in flight: min(m, D - r) on rank r
    rank 2  ..0aa1bb2cc3dd....
    """
    count = micro_batches * batches
    ahead = min(count, depth - 1 - rank)
    yield from (Forward(rank, number) for number in range(ahead))
    for number in range(count - ahead):
        yield Forward(rank, ahead + number)
        yield Backward(rank, number)
    yield from (Backward(rank, number) for number in range(count - ahead, count))


def gems(rank: int, depth: int, micro_batches: int, batches: int) -> Iterator[Compute]:
    """Batches in turn through two inverted replicas; each batch alone as in GPipe.

    Stage s of the second replica is on rank D-1-s, so its forward follows the first replica's backward from rank to
    rank, using the memory that is just freed. Two batches are GEMS-MAST, more are GEMS-MASTER; one reduction at the
    end.

    rank 0  0......aa1bb2........cc    time D + 2·D·b + b - 1 (D = 3, b = 3 batches of one micro-batch)
    rank 1  .0...aa1....bb2....cc..    in flight: 1 on each rank, over both replicas together
    rank 2  ..0aa1........bb2cc....    (micro-batch 1 is on the second replica)
    """
    for batch in range(batches):
        replica = batch % 2
        stage = depth - 1 - rank if replica else rank
        numbers = range(batch * micro_batches, (batch + 1) * micro_batches)
        yield from (Forward(stage, number, replica) for number in numbers)
        yield from (Backward(stage, number, replica) for number in numbers)


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("model-parallel", model_parallel),
        Schedule("gpipe", gpipe),
        Schedule("1f1b", one_f_one_b),
        Schedule("gems-mast", gems, replicas=2, batches=2),
        Schedule("gems-master", gems, replicas=2),
    )
}
"""All named schedules."""


def schedule_named(name: str) -> Schedule:
    """The schedule of that name.

    >>> schedule_named("1f1b").replicas
    1
    """
    if name not in SCHEDULES:
        raise ProgramError(f"no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def merge_orders(stages: Stages, orders: Sequence[Sequence[Compute]], placement: Sequence[int]) -> list[list[Compute]]:
    """The order of every rank, given the order of every stage and the rank it lies on."""
    from outcore.program.compile import assemble
    from outcore.program.simulator.simulate import simulate

    timeline = simulate(assemble(stages, orders, name="one stage to a rank"), stages)
    merged: list[list[Compute]] = [[] for _ in range(max(placement) + 1)]
    # Events stand in the order in which they began, also those of no length.
    for event in timeline.events:
        if event.kind in ("forward", "backward"):
            kind = Forward if event.kind == "forward" else Backward
            merged[placement[event.stage]].append(kind(event.stage, event.micro_batch, event.replica))
    return merged
