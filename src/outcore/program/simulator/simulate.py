"""The simulator: from a program, its stages and its links to a timeline.

Event-driven. A rank issues its instructions in order until it reaches a compute; that waits for the values, gradients,
copies and reductions it needs, then runs, and the rank goes on when it ends. A transfer begins when it has been sent
and its receive issued, the transfers before it on the same channel have begun, and both ends are free. Everything
happens in the order of time, so each link is granted to whoever asks first.

Memory. Parameters, gradients and optimizer state are held throughout. What a forward saves is held from its start to
its backward's end; values that it received or that it makes for other stages are part of that, so a receive's buffer
counts on its own only until the forward begins, and what two stages of one rank pass to each other counts once. A
gradient for another stage is held from the start of the backward that makes it until its transfer or local use is over,
a received one from the issue of its receive until its user ends, workspace while a compute runs. Without backwards
nothing is saved, and values count like gradients.

A first stage on a grid of ranks begins when all of them, and what it needs, are there; from then on each goes its own
way through the script of its part (`outcore.program.simulator.part_time`). Its gradients are held from the end of its
first backward on: until then they are in what was counted for the backward itself.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Hashable
from functools import partial

from outcore.errors import ProgramError
from outcore.program.compile import keys_needed
from outcore.program.instructions import (
    Backward,
    Compute,
    Forward,
    Key,
    OptimizerStep,
    Receive,
    Reduce,
    Send,
)
from outcore.program.program import Program
from outcore.program.simulator.links import Links, LinkSchedule
from outcore.program.simulator.memory_curve import MemoryLedger
from outcore.program.simulator.part_time import SplitStageCosts, perform_parts, script_of
from outcore.program.simulator.script_time import ScriptTiming, perform
from outcore.program.stages import Stages
from outcore.program.timeline import COMPUTE, Event, Timeline


def simulate(
    program: Program, stages: Stages, links: Links | None = None, *, split: SplitStageCosts | None = None
) -> Timeline:
    """The timeline of a step of the program; without links, transfers and copies take no time; `split` is the first
    stage of a program in which several ranks compute it together.

    >>> from outcore.program.compile import compile_program
    >>> chain = Stages.uniform(4)
    >>> simulate(compile_program(chain, "gpipe", micro_batches=8), chain).step_s
    33.0

    Raises:
        ProgramError: if the program never ends; `check` says why.
    """
    return _Simulation(program, stages, links or Links(), split).run()


class _Simulation:
    def __init__(self, program: Program, stages: Stages, links: Links, split: SplitStageCosts | None = None) -> None:
        self.program, self.stages, self.split = program, stages, split
        self.gathered: defaultdict[Compute, dict[int, float]] = defaultdict(dict)
        self.incoming, self.outgoing = stages.incoming(), stages.outgoing()
        self.sizes = {edge.value: edge.bytes for edge in stages.edges}
        self.placement, self.trains = program.placement(), program.trains()
        self.traffic = LinkSchedule(links)
        self.events: list[Event] = []
        self.ledgers = [MemoryLedger() for _ in program.ranks]
        self.queue: list[tuple[float, int, int, Hashable]] = []
        self.sequence = 0
        self.position = [0] * len(program)
        self.here: list[set[Hashable]] = [set() for _ in program.ranks]
        self.missing: dict[int, set[Hashable]] = {}
        self.offered: dict[Key, float] = {}
        self.posted: dict[Key, float] = {}
        self.channels: defaultdict[tuple[int, int, int], deque[Send]] = defaultdict(deque)
        self.uses: Counter[tuple[str, int, int]] = Counter()
        self.joined: defaultdict[tuple[int, tuple[int, ...]], list[float]] = defaultdict(list)
        self.evicted: defaultdict[tuple[int, int, int], dict[str, float]] = defaultdict(dict)
        self.reducing: set[tuple[int, int]] = set()
        holders = program.holders() if stages.ties else {}
        self.tied = [tuple(sorted({rank for k in tie.stages for rank in holders.get(k, ())})) for tie in stages.ties]
        self.tying: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self.held: Counter[tuple[int, int, int]] = Counter()
        self.graded: set[int] = set()

    def run(self) -> Timeline:
        for stage, rank in sorted({(stage, rank) for (stage, _), rank in self.placement.items()}):
            costs = self.stages.stages[stage]
            together = self.split.parts if self.split is not None and stage == 0 else 1
            for member in range(rank, rank + together):
                self.ledgers[member].add(0.0, "parameters", costs.parameter_bytes)
                self.ledgers[member].add(0.0, "gradients", costs.gradient_bytes if together == 1 else 0)
                self.ledgers[member].add(0.0, "state", costs.state_bytes)
        for rank in range(len(self.program)):
            self.schedule(0.0, rank, None)
        while self.queue:
            time_s, _, rank, token = heapq.heappop(self.queue)
            if token is None:
                self.advance(rank, time_s)
                continue
            self.here[rank].add(token)
            if (missing := self.missing.get(rank)) is not None:
                missing.discard(token)
                if not missing:
                    del self.missing[rank]
                    self.advance(rank, time_s)
        self.refuse_unfinished()
        return Timeline(self.program.name, tuple(self.events), tuple(ledger.curve() for ledger in self.ledgers))

    def schedule(self, time_s: float, rank: int, token: Hashable) -> None:
        self.sequence += 1
        heapq.heappush(self.queue, (time_s, self.sequence, rank, token))

    def advance(self, rank: int, now: float) -> None:
        """Issue instructions of a rank until one computes or waits."""
        instructions = self.program.ranks[rank]
        while self.position[rank] < len(instructions):
            instruction = instructions[self.position[rank]]
            match instruction:
                case Send():
                    now = self.handle(rank, instruction, now)
                    self.offered[instruction.key] = now
                    channel = (instruction.source, instruction.target, instruction.replica)
                    self.channels[channel].append(instruction)
                    self.move(channel, now)
                case Receive():
                    now = self.handle(rank, instruction, now)
                    self.posted[instruction.key] = now
                    self.ledgers[rank].add(now, "buffers", self.sizes.get(instruction.value, 0))
                    self.move((instruction.source, instruction.target, instruction.replica), now)
                case Reduce():
                    self.join(rank, instruction, now)
                case _:
                    if isinstance(instruction, OptimizerStep):
                        self.tie(rank, now)
                    if missing := self.needs(rank, instruction) - self.here[rank]:
                        self.missing[rank] = missing
                        return
                    if self.split is not None and instruction.stage == 0 and isinstance(instruction, Compute):
                        self.compute_together(rank, instruction, now, self.split)
                        return
                    self.position[rank] += 1
                    self.schedule(self.compute(rank, instruction, now), rank, None)
                    return
            self.position[rank] += 1

    def handle(self, rank: int, message: Send | Receive, now: float) -> float:
        """When a rank has done what a message takes of its host."""
        seconds = self.traffic.links.host_s(message.source, message.target)
        return self.traffic.handle(rank, seconds, now)

    def needs(self, rank: int, instruction: Compute | OptimizerStep) -> set[Hashable]:
        if isinstance(instruction, OptimizerStep):
            tied: set[Hashable] = {("tied", number) for number, ranks in enumerate(self.tied) if rank in ranks}
            return tied | ({("reduced", instruction.stage)} if (rank, instruction.stage) in self.reducing else set())
        if self.split is not None and self.placement[instruction.stage, instruction.replica] != rank:
            return set()  # one of several that compute it together, of which the first is given what it needs
        return set(keys_needed(instruction, self.incoming, self.outgoing))

    def move(self, channel: tuple[int, int, int], now: float) -> None:
        """Begin the transfers of a channel that are sent and received, in order."""
        queue = self.channels[channel]
        while queue and queue[0].key in self.posted:
            send = queue.popleft()
            nbytes = self.sizes.get(send.value, 0)
            start, end, arrival = self.traffic.transfer(send.source, send.target, nbytes, now)
            labels = (send.stage, send.micro_batch, send.replica, nbytes)
            kind = "gradient" if send.gradient else "value"
            self.events.append(Event(send.source, "send", kind, str(send), start, end, *labels))
            self.events.append(Event(send.target, "receive", kind, str(send), start, arrival, *labels))
            self.release(send.key, send.source, end, first=True)
            self.schedule(arrival, send.target, send.key)

    def release(self, key: Key, rank: int, time_s: float, *, first: bool) -> None:
        """End one use of what a compute made; a value is freed after the last, a gradient has one."""
        value, _, micro_batch, replica, gradient = key
        if not gradient:
            if self.trains:
                return  # part of what its stage saves
            self.uses[value, micro_batch, replica] -= 1
            if self.uses[value, micro_batch, replica]:
                return
        self.ledgers[rank].add(time_s, "buffers", -self.sizes.get(value, 0), first=first)

    def join(self, rank: int, reduce: Reduce, now: float) -> None:
        """Start a reduction when its whole group has reached it."""
        self.reducing.add((rank, reduce.stage))
        arrived = self.joined[reduce.stage, reduce.group]
        arrived.append(now)
        if len(arrived) < len(reduce.group):
            return
        nbytes = self.stages.stages[reduce.stage].gradient_bytes
        start, end = self.traffic.reduce(reduce.group, nbytes, max(arrived))
        for member in reduce.group:
            self.events.append(
                Event(member, "reduce", "reduce", str(reduce), start, end, stage=reduce.stage, bytes=nbytes)
            )
            self.schedule(end, member, ("reduced", reduce.stage))

    def tie(self, rank: int, now: float) -> None:
        """Add up the gradients of tied copies when the last of their ranks has reached its steps."""
        for number, (tie, ranks) in enumerate(zip(self.stages.ties, self.tied, strict=True)):
            if rank not in ranks or rank in self.tying[number]:
                continue
            self.tying[number][rank] = now
            if len(self.tying[number]) < len(ranks):
                continue
            start, end = self.traffic.reduce(ranks, tie.bytes, max(self.tying[number].values()))
            name = "R" + "+".join(map(str, tie.stages))
            for member in ranks:
                if len(ranks) > 1:
                    self.events.append(
                        Event(member, "reduce", "reduce", name, start, end, stage=tie.stages[0], bytes=tie.bytes)
                    )
                self.schedule(end, member, ("tied", number))

    def compute(self, rank: int, instruction: Compute | OptimizerStep, now: float) -> float:
        """Run a forward, backward or step that has all it needs; returns when it ends."""
        costs = self.stages.stages[instruction.stage]
        now = self.traffic.begin(rank, now)
        if isinstance(instruction, OptimizerStep):
            end = now + costs.optimizer_s
            self.traffic.finish(rank, end)
            self.ledgers[rank].add(now, "workspace", costs.update_bytes)
            self.ledgers[rank].add(end, "workspace", -costs.update_bytes)
            self.events.append(Event(rank, COMPUTE, "step", str(instruction), now, end, stage=instruction.stage))
            return end
        ledger = self.ledgers[rank]
        of = (instruction.stage, instruction.micro_batch, instruction.replica)
        if isinstance(instruction, Forward) and self.trains:
            saved = costs.saved_bytes - self.shared_bytes(rank, instruction)
            self.held[of] += saved
            ledger.add(now, "saved", saved)
        ledger.add(now, "workspace", costs.workspace_bytes)
        self.make(rank, instruction, now)
        hold = partial(self.hold, rank, of)
        end = perform(ScriptTiming(rank, instruction, costs, now, self.evicted[of]), self.traffic, self.events, hold)
        self.traffic.finish(rank, end)
        self.use(rank, instruction, now, end)
        if isinstance(instruction, Backward):
            ledger.add(end, "saved", -self.held.pop(of, 0))
        ledger.add(end, "workspace", -costs.workspace_bytes)
        return end

    def compute_together(self, rank: int, compute: Compute, now: float, split: SplitStageCosts) -> None:
        """Run a forward or backward of the split stage when the last of its ranks has reached it."""
        arrived = self.gathered[compute]
        arrived[rank] = now
        self.missing[rank] = {("together", compute)}
        if len(arrived) < split.parts:
            return
        first = self.placement[compute.stage, compute.replica]
        ranks = range(first, first + split.parts)
        # The first has waited for what other stages send; the others wait for it in their first message.
        starts = [arrived[member] for member in ranks]
        script = script_of(split, compute)
        ends = perform_parts(script, compute, ranks, starts, self.traffic, self.events)
        self.make(first, compute, starts[0])
        self.use(first, compute, starts[0], ends[0])
        gradient = self.stages.stages[0].gradient_bytes
        for member, start, end, memory in zip(ranks, starts, ends, split.memory, strict=True):
            ledger = self.ledgers[member]
            if isinstance(compute, Forward):
                ledger.add(start, "saved", memory.held if self.trains else 0)
                beside = memory.forward_peak - (memory.held if self.trains else 0)
            else:
                ledger.add(end, "saved", -memory.held)
                beside = memory.peak - memory.held
                if member not in self.graded:
                    self.graded.add(member)
                    ledger.add(end, "gradients", gradient)
            ledger.add(start, "workspace", max(0, beside))
            ledger.add(end, "workspace", -max(0, beside), first=True)
            del self.missing[member]
            self.position[member] += 1
            self.schedule(end, member, None)

    def hold(self, rank: int, of: tuple[int, int, int], time_s: float, nbytes: int) -> None:
        """Hold more or less for the backward of a micro-batch, as a script says."""
        self.held[of] += nbytes
        self.ledgers[rank].add(time_s, "saved", nbytes, first=nbytes < 0)

    def shared_bytes(self, rank: int, forward: Forward) -> int:
        """Bytes that a forward saves and that another stage of the rank holds already."""
        saved, replica = self.stages.stages[forward.stage].saved_bytes, forward.replica
        local = (e.bytes for e in self.incoming[forward.stage] if self.placement.get((e.source, replica)) == rank)
        return min(saved, sum(local))

    def make(self, rank: int, compute: Compute, now: float) -> None:
        """Hold what a compute makes for other stages; what stays on the rank is available to later computes."""
        stage, micro_batch, replica = compute.stage, compute.micro_batch, compute.replica
        if isinstance(compute, Forward):
            for edge in self.outgoing[stage]:
                if not self.trains:
                    self.uses[edge.value, micro_batch, replica] = len(edge.targets)
                    self.ledgers[rank].add(now, "buffers", edge.bytes)
                for user in edge.targets:
                    if self.placement.get((user, replica)) == rank:
                        self.here[rank].add((edge.value, user, micro_batch, replica, False))
            return
        for edge in self.incoming[stage]:
            if edge.has_gradient:
                self.ledgers[rank].add(now, "buffers", edge.bytes)
                if self.placement.get((edge.source, replica)) == rank:
                    self.here[rank].add((edge.value, stage, micro_batch, replica, True))

    def use(self, rank: int, compute: Compute, start: float, end: float) -> None:
        """Free what a compute used: its own receive buffers, and its part in values of the same rank."""
        saves = isinstance(compute, Forward) and self.trains
        for key in keys_needed(compute, self.incoming, self.outgoing):
            self.here[rank].discard(key)
            if key in self.posted:
                self.ledgers[rank].add(start if saves else end, "buffers", -self.sizes[key[0]], first=saves)
            else:
                self.release(key, rank, end, first=False)

    def refuse_unfinished(self) -> None:
        for rank, missing in sorted(self.missing.items()):
            instruction = self.program.ranks[rank][self.position[rank]]
            waits = ", ".join(sorted(map(str, missing)))
            raise ProgramError(
                f"rank {rank}, instruction {self.position[rank]} ({instruction}) never gets what it waits for: {waits}"
            )
