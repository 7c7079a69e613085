"""Whether all ranks reach the end.

The program is followed without a clock, in any order that its waits allow: a compute waits until what it needs has been
sent, a reduction until its whole group has reached it. Sends and receives never wait. Reductions are taken as barriers
although the engine need not stop at them: ranks that issue two of them in opposite orders would hang in a real library.
"""

from __future__ import annotations

from outcore.program.compile import keys_needed
from outcore.program.index import InstructionAt, ProgramIndex, refuse
from outcore.program.instructions import Backward, Forward, Key, Reduce, Send

__all__ = ["check_end"]


def check_end(index: ProgramIndex) -> None:
    """Raise `ProgramError` if not all ranks reach their end; the other rules must hold already."""
    incoming, outgoing = index.stages.incoming(), index.stages.outgoing()
    ranks = index.program.ranks
    position, sent = [0] * len(ranks), set[Key]()
    waiting: dict[Key, int] = {}
    arrived: dict[tuple[int, tuple[int, ...]], int] = {}
    ready = list(range(len(ranks)))
    while ready:
        rank = ready.pop()
        while position[rank] < len(ranks[rank]):
            instruction = ranks[rank][position[rank]]
            if isinstance(instruction, Forward | Backward):
                keys = keys_needed(instruction, incoming, outgoing)
                blocked = next((key for key in keys if key in index.receives and key not in sent), None)
                if blocked is not None:
                    waiting[blocked] = rank
                    break
            position[rank] += 1
            if isinstance(instruction, Send):
                sent.add(instruction.key)
                if (awaited := waiting.pop(instruction.key, None)) is not None:
                    ready.append(awaited)
            elif isinstance(instruction, Reduce) and len(instruction.group) > 1:
                key = (instruction.stage, instruction.group)
                arrived[key] = arrived.get(key, 0) + 1
                if arrived[key] < len(instruction.group):
                    position[rank] -= 1
                    break
                for member in instruction.group:
                    if member != rank:
                        position[member] += 1
                        ready.append(member)
    for rank, stopped in enumerate(position):
        if stopped < len(ranks[rank]):
            spot = InstructionAt(rank, stopped, ranks[rank][stopped])
            cause = next((index.sends[key] for key, waiter in waiting.items() if waiter == rank), None)
            refuse(spot, f"deadlock: it waits for {cause or 'the rest of its group'}, which is never reached")
