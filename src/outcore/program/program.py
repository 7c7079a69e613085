"""A program: for each rank, the list of instructions of one training step.

It is what a plan compiles to, what the simulator times and what the engine runs. It prints one line per rank with
what is computed (`str`) or with everything (`text(communication=True)`); a prime marks the second replica of a rank:

    rank 0  F0 B0 F1' B1' R0 R1 U0 U1
    rank 1  F0 B0 F1' B1' R0 R1 U0 U1
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.documents.reading import read_json
from outcore.documents.schema import Anything, ListOf, MapOf, Record, Text, check
from outcore.errors import ProgramError
from outcore.program.instructions import (
    Backward,
    Compute,
    Forward,
    Instruction,
    OptimizerStep,
    Receive,
    Reduce,
    Send,
    instruction_from_json,
    instruction_to_json,
)

VERSION = 1
_DOCUMENT = Record({"version": Anything(), "name": Text(), "ranks": ListOf(ListOf(MapOf()))})
"""Version of the JSON document."""

PRINTED_RANKS = 32


@dataclass(frozen=True, slots=True)
class Program:
    """One training step as instructions, rank by rank.

    >>> program = Program("by hand", ((Forward(0, 0), Backward(0, 0), OptimizerStep(0)),))
    >>> print(program)
    by hand: 1 rank, 3 instructions
    rank 0  F0 B0 U0
    >>> Program.from_json(program.to_json()) == program
    True
    """

    name: str
    ranks: tuple[tuple[Instruction, ...], ...]

    def __len__(self) -> int:
        return len(self.ranks)

    def computes(self, rank: int) -> Iterator[Compute]:
        """The forwards and backwards of a rank, in order."""
        return (i for i in self.ranks[rank] if isinstance(i, Forward | Backward))

    def placement(self) -> dict[tuple[int, int], int]:
        """The rank of each (stage, replica); the first, where several compute it together."""
        return place(tuple(self.computes(rank)) for rank in range(len(self)))

    def holders(self) -> dict[int, tuple[int, ...]]:
        """The ranks that hold a copy of each stage, ascending; a rank holds one copy also for two replicas."""
        found: dict[int, set[int]] = {}
        for rank in range(len(self)):
            for compute in self.computes(rank):
                found.setdefault(compute.stage, set()).add(rank)
        return {stage: tuple(sorted(ranks)) for stage, ranks in sorted(found.items())}

    def trains(self) -> bool:
        """Whether it has backwards; forwards alone evaluate."""
        return any(isinstance(i, Backward) for instructions in self.ranks for i in instructions)

    def in_flight(self) -> tuple[int, ...]:
        """For each rank, the most micro-batches whose forward has begun and whose backward has not ended."""
        peaks, trains = [], self.trains()
        for rank in range(len(self)):
            now = peak = 0
            for compute in self.computes(rank) if trains else ():
                now += 1 if isinstance(compute, Forward) else -1
                peak = max(peak, now)
            peaks.append(peak)
        return tuple(peaks)

    def text(self, *, communication: bool = False, ranks: int = PRINTED_RANKS) -> str:
        """One line for each of the first ranks, with or without what is not computing."""
        total = sum(map(len, self.ranks))
        lines = [f"{self.name}: {_count(len(self), 'rank')}, {_count(total, 'instruction')}"]
        width = len(str(min(len(self), ranks) - 1))
        for rank, instructions in enumerate(self.ranks[:ranks]):
            shown = (i for i in instructions if communication or not isinstance(i, Send | Receive))
            first = min((c.replica for c in self.computes(rank)), default=0)
            lines.append(f"rank {rank:>{width}}  " + " ".join(_word(i, first) for i in shown))
        if len(self) > ranks:
            lines.append(f"… {len(self) - ranks:,} more ranks")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def to_json(self) -> dict[str, Any]:
        """The program as plain lists, dictionaries, strings and numbers."""
        rows = [[instruction_to_json(i) for i in instructions] for instructions in self.ranks]
        return {"version": VERSION, "name": self.name, "ranks": rows}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str | Path = "a program") -> Program:
        """The program that `to_json` wrote, or that was written by hand."""
        if check(data, MapOf(), source, ProgramError).get("version") != VERSION:
            raise ProgramError(f"{source}: version is {data.get('version')!r}; this outcore reads {VERSION}")
        check(data, _DOCUMENT, source, ProgramError)
        ranks = []
        for rank, rows in enumerate(data["ranks"]):
            instructions = []
            for position, row in enumerate(rows):
                try:
                    instructions.append(instruction_from_json(row))
                except ProgramError as error:
                    raise ProgramError(f"{source}: rank {rank}, instruction {position}: {error}") from None
            ranks.append(tuple(instructions))
        return cls(data["name"], tuple(ranks))

    def save(self, path: str | Path) -> None:
        """Write the program as JSON, one instruction a line."""
        ranks = ",\n".join(
            "[\n" + ",\n".join(json.dumps(instruction_to_json(i), ensure_ascii=False) for i in instructions) + "\n]"
            for instructions in self.ranks
        )
        text = f'{{"version": {VERSION}, "name": {json.dumps(self.name)}, "ranks": [\n{ranks}\n]}}\n'
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Program:
        """Read a program written by `save`."""
        return cls.from_json(read_json(path, MapOf(), ProgramError), path)


def place(orders: Iterable[Sequence[Compute]]) -> dict[tuple[int, int], int]:
    """The rank of each (stage, replica), from what each rank computes."""
    found: dict[tuple[int, int], int] = {}
    for rank, order in enumerate(orders):
        for c in order:
            found.setdefault((c.stage, c.replica), rank)
    return found


def holders(placement: Mapping[tuple[int, int], int]) -> dict[int, tuple[int, ...]]:
    """The ranks that hold each stage, ascending."""
    found: dict[int, set[int]] = {}
    for (stage, _), rank in placement.items():
        found.setdefault(stage, set()).add(rank)
    return {stage: tuple(sorted(ranks)) for stage, ranks in sorted(found.items())}


def _word(instruction: Instruction, first_replica: int) -> str:
    if isinstance(instruction, Reduce | OptimizerStep):
        return str(instruction)
    return str(instruction) + "'" * (instruction.replica > first_replica)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
