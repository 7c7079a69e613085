"""The rules of computing, transfers and updates; `checks.py` lists them in words.

Every function assumes that those before it passed, in the order of `check`.
"""

from __future__ import annotations

from outcore.errors import ProgramError
from outcore.program.compile import keys_needed
from outcore.program.index import InstructionAt, ProgramIndex, refuse
from outcore.program.instructions import Backward, Forward, Key, Receive, Reduce, Send
from outcore.program.program import holders


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
