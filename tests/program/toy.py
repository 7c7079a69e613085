"""A toy engine: executes a program on whole numbers, ranks in random turns, transfers as queues per channel.

Stage s computes h = w·(x + Σ inputs) and hands h to its edges; the loss is the sum of all h, so every stage has a
gradient of its own besides those that come back. An edge without gradient is used and not differentiated.
"""

import random
from collections import defaultdict, deque

from outcore.program import Backward, Forward, OptimizerStep, Program, Receive, Reduce, Send, Stages


def weight(stage: int) -> int:
    return stage + 2


def sample(micro_batch: int, pipeline: int) -> int:
    return 10 * pipeline + micro_batch + 1


def whole(stages: Stages, x: int) -> list[int]:
    """The gradient of each stage's weight for one sample, by plain back-propagation."""
    incoming, outgoing = stages.incoming(), stages.outgoing()
    sums, h = [0] * len(stages), [0] * len(stages)
    for s in range(len(stages)):
        sums[s] = x + sum(h[edge.source] for edge in incoming[s])
        h[s] = weight(s) * sums[s]
    to_h = [1] * len(stages)
    for s in reversed(range(len(stages))):
        to_h[s] += sum(to_h[t] * weight(t) for edge in outgoing[s] if edge.has_gradient for t in edge.targets)
    return [to_h[s] * sums[s] for s in range(len(stages))]


class Toy:
    """Runs a program; `updated` holds the gradient with which each (rank, stage) stepped."""

    def __init__(self, program: Program, stages: Stages, rng: random.Random) -> None:
        self.program, self.stages, self.rng = program, stages, rng
        self.incoming, self.outgoing = stages.incoming(), stages.outgoing()
        self.replicas_per_rank = max(len({c.replica for c in program.computes(r)}) for r in range(len(program)))
        self.queues: defaultdict[tuple[int, int, int], deque[int]] = defaultdict(deque)
        self.posted: defaultdict[tuple[int, int, int], deque[tuple[object, ...]]] = defaultdict(deque)
        self.here: list[dict[tuple[object, ...], int]] = [{} for _ in program.ranks]
        self.saved: dict[tuple[int, int, int], int] = {}
        self.gradients: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.reduced: defaultdict[tuple[int, tuple[int, ...]], set[int]] = defaultdict(set)
        self.updated: dict[tuple[int, int], int] = {}
        self.placement = program.placement()
        self.makers = {edge.value: edge.source for edge in stages.edges}

    def run(self) -> None:
        at = [0] * len(self.program)
        left = [rank for rank, row in enumerate(self.program.ranks) if row]
        stuck = 0
        while left:
            rank = self.rng.choice(left)
            if not self.issue(rank, self.program.ranks[rank][at[rank]]):
                stuck += 1
                assert stuck < 10_000, "the program hangs"
                continue
            stuck = 0
            at[rank] += 1
            if at[rank] == len(self.program.ranks[rank]):
                left.remove(rank)

    def issue(self, rank: int, instruction: object) -> bool:
        match instruction:
            case Send():
                channel = (instruction.source, instruction.target, instruction.replica)
                self.queues[channel].append(self.here[rank].pop(("out", *instruction.key)))
            case Receive():
                channel = (instruction.source, instruction.target, instruction.replica)
                self.posted[channel].append(instruction.key)
            case Forward() | Backward():
                return self.compute(rank, instruction)
            case Reduce():
                group = self.reduced[instruction.stage, instruction.group]
                group.add(rank)
                if len(group) < len(instruction.group):
                    return False
                if len(group) == len(instruction.group) and -1 not in group:
                    total = sum(self.gradients[member, instruction.stage] for member in instruction.group)
                    for member in instruction.group:
                        self.gradients[member, instruction.stage] = total
                    group.add(-1)
            case OptimizerStep():
                self.updated[rank, instruction.stage] = self.gradients[rank, instruction.stage]
        return True

    def arrive(self) -> None:
        """Match the heads of what was sent and what was posted, by order alone: a wrong order mixes values up."""
        for channel, posted in self.posted.items():
            while posted and self.queues[channel]:
                self.here[channel[1]][posted.popleft()] = self.queues[channel].popleft()

    def compute(self, rank: int, c: Forward | Backward) -> bool:
        self.arrive()
        here, of = self.here[rank], (c.stage, c.micro_batch, c.replica)
        if isinstance(c, Forward):
            keys = [(edge.value, c.stage, c.micro_batch, c.replica, False) for edge in self.incoming[c.stage]]
            if any(key not in here for key in keys):
                return False
            x = sample(c.micro_batch, c.replica // self.replicas_per_rank)
            self.saved[of] = x + sum(here.pop(key) for key in keys)
            for edge in self.outgoing[c.stage]:
                for user in edge.targets:
                    self.give(
                        rank, (edge.value, user, c.micro_batch, c.replica, False), weight(c.stage) * self.saved[of]
                    )
            return True
        edges = [edge for edge in self.outgoing[c.stage] if edge.has_gradient]
        keys = [(edge.value, user, c.micro_batch, c.replica, True) for edge in edges for user in edge.targets]
        if any(key not in here for key in keys):
            return False
        to_h = 1 + sum(here.pop(key) for key in keys)
        self.gradients[rank, c.stage] += to_h * self.saved.pop(of)
        for edge in self.incoming[c.stage]:
            if edge.has_gradient:
                self.give(rank, (edge.value, c.stage, c.micro_batch, c.replica, True), to_h * weight(c.stage))
        return True

    def give(self, rank: int, key: tuple[str, int, int, int, bool], number: int) -> None:
        """Ready to be sent, or here already when maker and user share the rank."""
        value, user, _, replica, gradient = key
        there = self.placement[self.makers[value] if gradient else user, replica]
        self.here[rank][key if there == rank else ("out", *key)] = number
