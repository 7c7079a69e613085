"""From an order of computing written in a plan (`outcore.program.plan.order`) to a program, and back.

A step with fewer micro-batches runs the same order without the others: what a micro-batch waits for is always of the
same micro-batch, so what is left still meets.
"""

from __future__ import annotations

from collections.abc import Sequence

from outcore.program.compile import assemble
from outcore.program.instructions import Backward, Compute, Forward
from outcore.program.plan.order import read_row
from outcore.program.program import Program
from outcore.program.stages import Stages


def write_order(orders: Sequence[Sequence[Compute]]) -> tuple[str, ...]:
    """The rows of a pipeline.

    >>> write_order([[Forward(0, 0), Backward(0, 0)], [Forward(1, 0), Backward(1, 0)]])
    ('F0 B0', 'F0 B0')
    """
    return tuple(" ".join(f"{'F' if isinstance(c, Forward) else 'B'}{c.micro_batch}" for c in row) for row in orders)


def program_in_order(
    stages: Stages,
    rows: Sequence[str],
    *,
    inverted: bool,
    replicas: int = 1,
    micro_batches: int | None = None,
) -> Program:
    """The program of written rows.

    Args:
        stages: the network, one stage to a rank.
        rows: the order of every rank of one pipeline.
        inverted: whether odd micro-batches go through a second replica, placed the other way round.
        replicas: data-parallel replicas of the pipeline.
        micro_batches: only the first so many.
    """
    copies, last = 2 if inverted else 1, len(stages) - 1
    orders: list[list[Compute]] = []
    for pipeline in range(replicas):
        for rank, row in enumerate(rows):
            order: list[Compute] = []
            for letter, number in read_row(row, rank):
                if micro_batches is None or number < micro_batches:
                    second = number % copies
                    kind: type[Compute] = Forward if letter == "F" else Backward
                    order.append(kind(last - rank if second else rank, number, pipeline * copies + second))
            orders.append(order)
    return assemble(stages, orders, name="synthesised")
