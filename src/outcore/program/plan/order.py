"""An order of computing as text, so that a plan can carry one that no schedule has a name for.

A row per rank of one pipeline, each a list of forwards and backwards by number of the micro-batch: ``F0 F1 B0 B1``. On
which stage of which replica follows from the placement: stage r on rank r, or, with two inverted replicas (GEMS), odd
micro-batches on the second, whose stage D-1-r is on rank r.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from outcore.errors import PlanError

OrderWord = tuple[str, int]
"""``F`` or ``B``, and the micro-batch."""

_WORD = re.compile(r"([FB])(0|[1-9]\d{0,5})")


def read_row(row: str, rank: int) -> list[OrderWord]:
    """What a rank does, in order.

    >>> read_row("F0 B0", 0)
    [('F', 0), ('B', 0)]
    """
    found = []
    for word in row.split():
        if (match := _WORD.fullmatch(word)) is None:
            raise PlanError(f"row {rank} of the order has {word!r}; needed words like F0 and B0")
        found.append((match[1], int(match[2])))
    return found


def check_order(rows: Sequence[str], ranks: int, micro_batches: int, *, inverted: bool = False) -> None:
    """Refuse rows that are not an order of so many micro-batches on so many ranks.

    Each micro-batch goes forward and backward once on every rank, and every stage takes them in ascending order, as in
    all named schedules: gradients then add up in the order in which one device would add them. Whether ranks would wait
    for each other for ever is found when the program is made.

    Raises:
        PlanError: names the row and what is wrong with it.
    """
    if len(rows) != ranks:
        raise PlanError(f"the order has {len(rows)} rows; needed one for each of {ranks} ranks")
    copies = 2 if inverted else 1
    for rank, row in enumerate(rows):
        words = read_row(row, rank)
        for letter, name in (("F", "forwards"), ("B", "backwards")):
            for first in range(copies):
                seen = [n for kind, n in words if kind == letter and n % copies == first]
                if seen != (needed := list(range(first, micro_batches, copies))):
                    raise PlanError(
                        f"row {rank} of the order has the {name} {_short(seen)}; needed {_short(needed)}, in this order"
                    )
        at = {word: place for place, word in enumerate(words)}
        if (early := next((n for n in range(micro_batches) if at["B", n] < at["F", n]), None)) is not None:
            raise PlanError(f"row {rank} of the order has B{early} before F{early}")


def _short(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, … ({len(numbers)} in all)" if len(numbers) > 8 else shown or "none"
