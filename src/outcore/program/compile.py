"""From stages and an order of computing to a program.

Everything but the computing follows from the order. A value is sent right after the forward that makes it, straight
to each stage that uses it, and its gradient right after the backward of each user. A receive is issued `ahead`
computes before the one that needs it: early enough for the transfer to overlap, late enough that only so many buffers
exist (posting all at the start would hold one buffer per micro-batch). Transfers between two ranks keep one order at
both ends. Reductions come last and in ascending order of stages on every rank, so that ranks which share two groups
(as under GEMS) issue them in the same order.

The first stage may be on several ranks at once, each with a part of the image. A program is compiled as if one rank
computed the first stage; here that rank becomes several. All of them compute it at the same moments, and exchange what
they need among themselves inside it; only the first of them sends to and receives from later stages. Their gradients
are parts of one sum, and are added up as those of copies are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from outcore.errors import ProgramError
from outcore.program.instructions import (
    Backward,
    Compute,
    Forward,
    Instruction,
    Key,
    OptimizerStep,
    Receive,
    Reduce,
    Send,
)
from outcore.program.program import Program, holders, place
from outcore.program.schedules import merge_orders, schedule_named
from outcore.program.stages import Edge, Stages

Channel = tuple[int, int, int]
"""Source rank, target rank, replica: transfers on one channel arrive in the order in which they were sent."""


def compile_program(
    stages: Stages,
    schedule: str,
    *,
    micro_batches: int = 1,
    batches: int | None = None,
    replicas: int = 1,
    ahead: int = 1,
    training: bool = True,
    placement: Sequence[int] | None = None,
) -> Program:
    """The program of a named schedule, one stage to a rank unless placed otherwise.

    >>> print(compile_program(Stages.uniform(2), "gpipe", micro_batches=2))
    gpipe: 2 ranks, 16 instructions
    rank 0  F0 F1 B0 B1
    rank 1  F0 F1 B0 B1

    Args:
        stages: the network.
        schedule: one of `SCHEDULES`.
        micro_batches: into how many parts each batch is cut.
        batches: batches before one reduction; 1, or 2 under GEMS, when not given.
        replicas: data-parallel replicas, each on as many ranks as there are stages (GEMS has two networks on each).
        ahead: how many computes before it is needed a receive is issued.
        training: False for forwards alone, which evaluate and change nothing.
        placement: the rank of each stage inside a pipeline; several may share one, except under GEMS.
    """
    chosen = schedule_named(schedule)
    batches = batches if batches is not None else chosen.batches or chosen.replicas
    for name, number in (("micro_batches", micro_batches), ("batches", batches), ("replicas", replicas)):
        if number < 1:
            raise ProgramError(f"{name} is {number}; needed at least 1")
    if chosen.batches is not None and batches != chosen.batches:
        raise ProgramError(
            f"{schedule} takes {chosen.batches} batches before a reduction, got {batches}; gems-master takes any number"
        )
    depth = len(stages)
    rows = [
        [c for c in chosen.order(rank, depth, micro_batches, batches) if training or isinstance(c, Forward)]
        for rank in range(depth)
    ]
    rows = _placed(stages, rows, tuple(placement or range(depth)), chosen.name)
    orders = [
        [type(c)(c.stage, c.micro_batch, pipeline * chosen.replicas + c.replica) for c in row]
        for pipeline in range(replicas)
        for row in rows
    ]
    return assemble(stages, orders, name=schedule, ahead=ahead)


def _placed(
    stages: Stages, rows: list[list[Compute]], placement: tuple[int, ...], schedule: str
) -> list[list[Compute]]:
    """What each rank computes when stage k is on rank ``placement[k]``."""
    if len(placement) != len(rows) or set(placement) != set(range(max(placement) + 1)):
        raise ProgramError(f"placement {list(placement)} must name a rank for each of {len(rows)} stages, from 0 on")
    if len(set(placement)) == len(placement):
        return [rows[placement.index(rank)] for rank in range(len(placement))]
    if schedule_named(schedule).replicas > 1:
        raise ProgramError(f"{schedule} places the stages of its two replicas itself; leave the placement out")
    return merge_orders(stages, rows, placement)


def assemble(stages: Stages, orders: Sequence[Sequence[Compute]], *, name: str, ahead: int = 1) -> Program:
    """The program in which each rank computes in the order given; several stages may share a rank."""
    if ahead < 0:
        raise ProgramError(f"ahead is {ahead}; needed 0 (receive when it is needed) or more computes")
    placement = place(orders)
    incoming, outgoing = stages.incoming(), stages.outgoing()
    for rank, order in enumerate(orders):
        for compute in order:
            if not 0 <= compute.stage < len(stages):
                raise ProgramError(f"rank {rank} computes stage {compute.stage}; there are {len(stages)}")
    if missing := _missing(placement, len(stages)):
        raise ProgramError(f"no rank computes stage {missing[0]} of replica {missing[1]}")

    sends = [[list(sends_of(compute, incoming, outgoing, placement)) for compute in order] for order in orders]
    channels = _Channels(send for row in sends for after in row for send in after)
    held = holders(placement)
    ranks = []
    for order, sent in zip(orders, sends, strict=True):
        instructions: list[Instruction] = []
        next_to_receive = 0
        for index, compute in enumerate(order):
            while next_to_receive <= min(index + ahead, len(order) - 1):
                for key in keys_needed(order[next_to_receive], incoming, outgoing):
                    instructions.extend(channels.receives_until(key))
                next_to_receive += 1
            instructions.append(compute)
            instructions.extend(sent[index])
        trained = sorted({c.stage for c in order if isinstance(c, Backward) and stages.stages[c.stage].trains})
        instructions.extend(Reduce(stage, held[stage]) for stage in trained if len(held[stage]) > 1)
        instructions.extend(OptimizerStep(stage) for stage in trained)
        ranks.append(tuple(instructions))
    return Program(name, tuple(ranks))


def sends_of(
    compute: Compute,
    incoming: Sequence[Sequence[Edge]],
    outgoing: Sequence[Sequence[Edge]],
    placement: dict[tuple[int, int], int],
) -> Iterator[Send]:
    """The sends that follow a forward or backward; none to a stage on the same rank."""
    stage, micro_batch, replica = compute.stage, compute.micro_batch, compute.replica
    here = placement[stage, replica]
    if isinstance(compute, Forward):
        for edge in outgoing[stage]:
            for user in edge.targets:
                if (there := placement[user, replica]) != here:
                    yield Send(edge.value, user, here, there, micro_batch, replica)
    else:
        for edge in incoming[stage]:
            if edge.has_gradient and (there := placement[edge.source, replica]) != here:
                yield Send(edge.value, stage, here, there, micro_batch, replica, gradient=True)


def keys_needed(
    compute: Compute, incoming: Sequence[Sequence[Edge]], outgoing: Sequence[Sequence[Edge]]
) -> Iterator[Key]:
    """Names of the values a forward uses, or of the gradients a backward adds; also those of the same rank."""
    stage, micro_batch, replica = compute.stage, compute.micro_batch, compute.replica
    if isinstance(compute, Backward):
        for edge in outgoing[stage]:
            if edge.has_gradient:
                yield from ((edge.value, user, micro_batch, replica, True) for user in edge.targets)
    else:
        yield from ((edge.value, stage, micro_batch, replica, False) for edge in incoming[stage])


class _Channels:
    """The transfers of each channel, and how many of them have their receive."""

    def __init__(self, sends: Iterable[Send]) -> None:
        self._queues: dict[Channel, list[Send]] = {}
        self._places: dict[Key, tuple[Channel, int]] = {}
        for send in sends:
            queue = self._queues.setdefault(channel := (send.source, send.target, send.replica), [])
            self._places[send.key] = (channel, len(queue))
            queue.append(send)
        self._received = dict.fromkeys(self._queues, 0)

    def receives_until(self, key: Key) -> list[Receive]:
        """The receives still to be issued for a transfer: its own, after those of all that was sent before it."""
        if key not in self._places:
            return []
        channel, place = self._places[key]
        begin = self._received[channel]
        self._received[channel] = max(begin, place + 1)
        return [
            Receive(s.value, s.stage, s.source, s.target, s.micro_batch, s.replica, gradient=s.gradient)
            for s in self._queues[channel][begin : place + 1]
        ]


def _missing(placement: dict[tuple[int, int], int], depth: int) -> tuple[int, int] | None:
    replicas = {replica for _, replica in placement} or {0}
    absent = ((stage, replica) for replica in sorted(replicas) for stage in range(depth))
    return next((pair for pair in absent if pair not in placement), None)


def split_first_stage(program: Program, parts: int, replicas: int) -> Program:
    """The program with `parts` ranks in place of the first one of every replica.

    >>> from outcore.program import Stages, compile_program
    >>> print(split_first_stage(compile_program(Stages.uniform(2), "gpipe"), 2, 1))
    gpipe: 3 ranks, 10 instructions
    rank 0  F0 B0
    rank 1  F0 B0
    rank 2  F0 B0
    """
    width = len(program) // replicas

    def moved(rank: int) -> int:
        replica, at = divmod(rank, width)
        return replica * (width + parts - 1) + (at + parts - 1 if at else 0)

    first = [moved(replica * width) + k for replica in range(replicas) for k in range(parts)]

    def renumbered(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Send | Receive):
            return replace(instruction, source=moved(instruction.source), target=moved(instruction.target))
        if isinstance(instruction, Reduce):
            group = first if instruction.stage == 0 else [moved(rank) for rank in instruction.group]
            return replace(instruction, group=tuple(group))
        return instruction

    rows = []
    for rank, given in enumerate(program.ranks):
        row = [renumbered(i) for i in given]
        if rank % width:
            rows.append(tuple(row))
            continue
        if OptimizerStep(0) in row and not any(isinstance(i, Reduce) and i.stage == 0 for i in row):
            begin = next(k for k, i in enumerate(row) if isinstance(i, Reduce | OptimizerStep))
            row.insert(begin, Reduce(0, tuple(first)))
        rows.append(tuple(row))
        alike = tuple(i for i in row if i.stage == 0 and not isinstance(i, Send | Receive))
        rows.extend([alike] * (parts - 1))
    return Program(program.name, tuple(rows))
