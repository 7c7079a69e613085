"""The rules of computing, transfers and updates; `checks.py` lists them in words.

Every function assumes that those before it passed, in the order of `check`.

They look instructions up in a `ProgramIndex`, in which every compute, transfer, reduction and step is found once. What
may exist only once is refused there when it exists twice, and what names a stage, value or rank that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, TypeVar

from outcore.errors import ProgramError
from outcore.program.compile import keys_needed
from outcore.program.instructions import (
    Backward,
    Forward,
    Instruction,
    Key,
    OptimizerStep,
    Receive,
    Reduce,
    Send,
)
from outcore.program.program import Program, holders
from outcore.program.stages import Edge, Stages

Of = tuple[int, int, int]
"""Stage, micro-batch, replica."""

K = TypeVar("K")


class InstructionAt(NamedTuple):
    """An instruction and where it stands."""

    rank: int
    position: int
    instruction: Instruction

    def __str__(self) -> str:
        return f"rank {self.rank}, instruction {self.position} ({self.instruction})"


def refuse(spot: InstructionAt, reason: str) -> NoReturn:
    """Raise the error that names the instruction and the rule it breaks."""
    raise ProgramError(f"{spot}: {reason}")


@dataclass(slots=True)
class ProgramIndex:
    """All instructions of a program, by what they do."""

    program: Program
    stages: Stages
    forwards: dict[Of, InstructionAt] = field(default_factory=dict)
    backwards: dict[Of, InstructionAt] = field(default_factory=dict)
    sends: dict[Key, InstructionAt] = field(default_factory=dict)
    receives: dict[Key, InstructionAt] = field(default_factory=dict)
    reduces: dict[tuple[int, int], InstructionAt] = field(default_factory=dict)
    """By rank and stage."""
    steps: dict[tuple[int, int], InstructionAt] = field(default_factory=dict)
    placement: dict[tuple[int, int], int] = field(default_factory=dict)
    edges: dict[str, Edge] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, stages: Stages) -> ProgramIndex:
        """The index of a program."""
        index = cls(program, stages, edges={edge.value: edge for edge in stages.edges})
        for rank, instructions in enumerate(program.ranks):
            for position, instruction in enumerate(instructions):
                index._enter(InstructionAt(rank, position, instruction))
        return index

    def _enter(self, spot: InstructionAt) -> None:
        rank, _, instruction = spot
        if not 0 <= instruction.stage < len(self.stages):
            refuse(spot, f"there is no stage {instruction.stage}; there are {len(self.stages)}")
        match instruction:
            case Forward(stage, micro_batch, replica) | Backward(stage, micro_batch, replica):
                found = self.forwards if isinstance(instruction, Forward) else self.backwards
                _once(found, (stage, micro_batch, replica), spot)
                if self.placement.setdefault((stage, replica), rank) != rank:
                    other = self.placement[stage, replica]
                    refuse(spot, f"stage {stage} of replica {replica} is computed on rank {other} too")
            case Send() | Receive():
                self._enter_transfer(spot, instruction)
            case Reduce(stage, _):
                _once(self.reduces, (rank, stage), spot)
            case OptimizerStep(stage):
                _once(self.steps, (rank, stage), spot)

    def _enter_transfer(self, spot: InstructionAt, transfer: Send | Receive) -> None:
        edge = self.edges.get(transfer.value)
        if edge is None or transfer.stage not in edge.targets:
            refuse(spot, f"no value {transfer.value!r} goes to stage {transfer.stage}")
        if transfer.gradient and not edge.has_gradient:
            refuse(spot, f"value {transfer.value!r} has no gradient")
        own, other = transfer.source, transfer.target
        if isinstance(transfer, Receive):
            own, other = other, own
        if own != spot.rank:
            refuse(spot, f"it is written for rank {own}, and stands on rank {spot.rank}")
        if other == own or not 0 <= other < len(self.program):
            refuse(spot, f"the other end is rank {other}; needed another of {len(self.program)} ranks")
        _once(self.sends if isinstance(transfer, Send) else self.receives, transfer.key, spot)


def _once(found: dict[K, InstructionAt], key: K, spot: InstructionAt) -> None:
    if (first := found.setdefault(key, spot)) is not spot:
        refuse(spot, f"the same is done at rank {first.rank}, instruction {first.position}; needed once")


def check_computes(index: ProgramIndex) -> None:
    """Every stage of every replica computes every micro-batch, forward and then backward."""
    batches: dict[int, dict[int, InstructionAt]] = {}
    for (_, micro_batch, replica), spot in index.forwards.items():
        batches.setdefault(replica, {}).setdefault(micro_batch, spot)
    for of, backward in index.backwards.items():
        forward = index.forwards.get(of)
        if forward is None:
            refuse(backward, "its forward is missing")
        if forward.position > backward.position:
            refuse(backward, f"its forward comes after it, at instruction {forward.position}")
    for replica, numbers in batches.items():
        for micro_batch, spot in numbers.items():
            for stage in range(len(index.stages)):
                if (stage, micro_batch, replica) not in index.forwards:
                    refuse(spot, f"stage {stage} of replica {replica} never computes micro-batch {micro_batch}")
    for of, forward in index.forwards.items():
        if index.backwards and of not in index.backwards:
            refuse(forward, "its backward is missing")
    if not index.forwards:
        raise ProgramError(f"program {index.program.name!r} computes nothing; needed at least one forward")


def check_inputs(index: ProgramIndex) -> None:
    """Every value and gradient is there before it is used, and comes from the rank that makes it."""
    incoming, outgoing = index.stages.incoming(), index.stages.outgoing()
    used: set[Key] = set()
    for spot in (*index.forwards.values(), *index.backwards.values()):
        compute = spot.instruction
        if not isinstance(compute, Forward | Backward):
            continue
        for key in keys_needed(compute, incoming, outgoing):
            value, user, micro_batch, replica, gradient = key
            maker = (user if gradient else index.edges[value].source, micro_batch, replica)
            made = index.backwards[maker] if gradient else index.forwards[maker]
            what = f"{'the gradient of ' if gradient else ''}{value!r} of micro-batch {micro_batch}"
            if made.rank == spot.rank:
                if made.position > spot.position:
                    refuse(spot, f"{what} is made after it, at instruction {made.position}")
                continue
            used.add(key)
            _check_transfer(index, spot, made, key, what)
    for key, spot in (*index.sends.items(), *index.receives.items()):
        if key not in used:
            refuse(spot, "nobody needs this transfer: maker and user are on one rank, or there is no such micro-batch")


def _check_transfer(index: ProgramIndex, user: InstructionAt, maker: InstructionAt, key: Key, what: str) -> None:
    receive, send = index.receives.get(key), index.sends.get(key)
    if receive is None:
        refuse(user, f"it needs {what} from rank {maker.rank}, and no receive brings it")
    if receive.rank != user.rank or receive.position > user.position:
        refuse(user, f"it needs {what}, which is received later or elsewhere: {receive}")
    if send is None:
        refuse(receive, f"rank {maker.rank} never sends {what}")
    if send.rank != maker.rank or send.position < maker.position:
        refuse(send, f"{what} is made by {maker}; it can only be sent after that, from there")
    for end in (send, receive):
        assert isinstance(end.instruction, Send | Receive)
        if (end.instruction.source, end.instruction.target) != (maker.rank, user.rank):
            refuse(end, f"{what} goes from rank {maker.rank} to rank {user.rank}")


def check_channels(index: ProgramIndex) -> None:
    """What is sent on a channel is received in the same order."""
    sent: dict[tuple[int, int, int], list[InstructionAt]] = {}
    received: dict[tuple[int, int, int], list[InstructionAt]] = {}
    for queues, spots in ((sent, index.sends), (received, index.receives)):
        for spot in spots.values():
            transfer = spot.instruction
            assert isinstance(transfer, Send | Receive)
            queues.setdefault((transfer.source, transfer.target, transfer.replica), []).append(spot)
    for channel, sends in sent.items():
        for send, receive in zip(sends, received[channel], strict=True):
            assert isinstance(send.instruction, Send) and isinstance(receive.instruction, Receive)
            if send.instruction.key != receive.instruction.key:
                refuse(receive, f"transfers arrive in the order they are sent, and the next one sent here is {send}")


def check_updates(index: ProgramIndex) -> None:
    """Each parameter is reduced over the ranks that hold it, after all its backwards, and stepped once."""
    held = holders(index.placement)
    last: dict[tuple[int, int], InstructionAt] = {}
    for (stage, _, _), spot in index.backwards.items():
        if (key := (spot.rank, stage)) not in last or last[key].position < spot.position:
            last[key] = spot
    for rank, stage in (*index.reduces, *index.steps):
        if (rank, stage) not in last:
            refuse(
                index.reduces.get((rank, stage)) or index.steps[rank, stage],
                f"no backward of stage {stage} is on rank {rank}",
            )
    for (rank, stage), backward in last.items():
        group = held[stage]
        reduce, step = index.reduces.get((rank, stage)), index.steps.get((rank, stage))
        if reduce is not None:
            assert isinstance(reduce.instruction, Reduce)
            if reduce.instruction.group != group:
                refuse(reduce, f"it is over ranks {list(reduce.instruction.group)}; stage {stage} is on {list(group)}")
            if reduce.position < backward.position:
                refuse(reduce, f"a backward of stage {stage} comes after it, at instruction {backward.position}")
        if index.stages.stages[stage].trains:
            if reduce is None and len(group) > 1:
                refuse(backward, f"stage {stage} is on ranks {list(group)} and is not reduced over them on this one")
            if step is None:
                refuse(backward, f"the optimizer never steps stage {stage} on rank {rank}")
        if step is not None and step.position < max(backward.position, reduce.position if reduce else 0):
            refuse(step, f"a backward or the reduction of stage {stage} comes after it")
