"""Static checks: what must hold for any program, compiled or written by hand.

Each rule names the first instruction which breaks it. Together they say that the program computes the gradient of every
parameter, once, and ends:

- every stage of every replica is computed, forward and then backward, once for each micro-batch of the replica, on
  one rank;
- a forward has all its inputs: made before on the same rank, or received before from the rank that makes them;
- a backward has the gradients of all users of its stage's values, likewise;
- what is sent is received, in the same order on each channel (source, target, replica), and nothing else is;
- a stage's gradients are added over all ranks that hold it, after their last backward; then it steps, once on each;
- followed in order, with reductions as barriers, all ranks reach the end;
- scripts fetch what they evicted before it is needed;
- a script that says what is computed leaves out no call and no tile; its passes begin when what they read is whole,
  and are sent back in the other direction;
- the simulated peak of each rank is within its cap.

A program of forwards alone evaluates: it saves, reduces and steps nothing.

To see whether all ranks reach the end, the program is followed without a clock, in any order that its waits allow: a
compute waits until what it needs has been sent, a reduction until its whole group has reached it. Sends and receives
never wait. Reductions are taken as barriers although the engine need not stop at them: ranks that issue two of them in
opposite orders would hang in a real library.
"""

from __future__ import annotations

from collections.abc import Sequence

from outcore.errors import ProgramError
from outcore.machine.units import format_bytes
from outcore.program.checker.rules import (
    InstructionAt,
    ProgramIndex,
    check_channels,
    check_computes,
    check_inputs,
    check_updates,
    refuse,
)
from outcore.program.checker.script_rules import check_scripts
from outcore.program.compile import keys_needed
from outcore.program.instructions import Backward, Forward, Key, Reduce, Send
from outcore.program.program import Program
from outcore.program.simulator.links import Links
from outcore.program.simulator.simulate import simulate
from outcore.program.stages import Stages
from outcore.program.timeline import COMPUTE, Timeline


def check(
    program: Program, stages: Stages, *, memory_bytes: int | Sequence[int] | None = None, links: Links | None = None
) -> None:
    """Raise `ProgramError` if the program breaks a rule, or needs more than `memory_bytes` (of all ranks, or of each).

    >>> from outcore.program.compile import compile_program
    >>> chain = Stages.uniform(2)
    >>> good = compile_program(chain, "gpipe", micro_batches=2)
    >>> check(good, chain)
    >>> check(Program("bad", (good.ranks[0][1:], good.ranks[1])), chain)
    Traceback (most recent call last):
    outcore.errors.ProgramError: rank 0, instruction 5 (B0): its forward is missing
    """
    index = ProgramIndex.of(program, stages)
    check_computes(index)
    check_inputs(index)
    check_channels(index)
    check_updates(index)
    check_end(index)
    for of, forward in index.forwards.items():
        check_scripts(forward, index.backwards.get(of), stages.stages[of[0]].calls)
    if memory_bytes is not None:
        check_memory(program, simulate(program, stages, links), memory_bytes)


def check_memory(program: Program, timeline: Timeline, memory_bytes: int | Sequence[int]) -> None:
    """Raise `ProgramError` if a rank's peak is above its cap, with what holds it."""
    caps = [memory_bytes] * len(timeline) if isinstance(memory_bytes, int) else memory_bytes
    if len(caps) != len(timeline):
        raise ProgramError(f"got {len(caps)} memory caps; needed one for each of {len(timeline)} ranks")
    for rank, (curve, cap) in enumerate(zip(timeline.memory, caps, strict=True)):
        if curve.peak_bytes > cap:
            begun = (e for e in timeline.events if e.rank == rank and e.stream == COMPUTE and e.start_s <= curve.peak_s)
            at = max(begun, key=lambda e: e.start_s, default=None)
            parts = ", ".join(f"{name} {format_bytes(held)}" for name, held in curve.parts().items() if held)
            raise ProgramError(
                f"rank {rank}, at {at.name if at else 'its start'}: needs {format_bytes(curve.peak_bytes)} "
                f"({parts}); the cap is {format_bytes(cap)}"
            )


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
