"""Where each instruction of a program stands: every compute, transfer, reduction and step, found once.

What may exist only once is refused here when it exists twice, and what names a stage, value or rank that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, TypeVar

from outcore.errors import ProgramError
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
from outcore.program.program import Program
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
