"""The first stage on several ranks at once, each with a part of the image.

A program is compiled as if one rank computed the first stage; here that rank becomes several. All of them compute it at
the same moments, and exchange what they need among themselves inside it; only the first of them sends to and receives
from later stages. Their gradients are parts of one sum, and are added up as those of copies are.
"""

from __future__ import annotations

from dataclasses import replace

from outcore.program.instructions import Instruction, OptimizerStep, Receive, Reduce, Send
from outcore.program.program import Program

__all__ = ["split_first_stage"]


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
