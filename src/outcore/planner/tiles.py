"""Where streaming stops and how large tiles are: the fastest step within a budget.

Every *candidate* says what is streamed (up to which boundary), how large its tiles are, how long a step would take and
roughly how much it would hold. Deep boundaries hold little but pay for wide halos twice; shallow ones leave more to run
untiled. Large tiles waste less on halos and hold more. Rough bytes order the candidates; the exact bytes, which take a
second each to find, are asked for in that order until one fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outcore.errors import PlanError
from outcore.machine.units import format_bytes

__all__ = ["Candidate", "choose"]


@dataclass(frozen=True)
class Candidate:
    """One way to stream."""

    boundary: tuple[str, ...] | None
    """Blocks after which streaming stops; none for as far as it goes."""
    tile: tuple[int, ...]
    """Input pixels per tile, without halo."""
    time_s: float
    """Of a step, forward passes, backward pass and the untiled rest."""
    rough_bytes: int
    """Peak of a step, by proportion."""

    def __str__(self) -> str:
        where = "as far as it goes" if self.boundary is None else f"to {', '.join(self.boundary)}"
        return f"{where} in tiles of {' x '.join(map(str, self.tile))} px: {self.time_s:.3g} s"


def choose(
    candidates: Sequence[Candidate],
    budget_bytes: int | None,
    exact_bytes: Callable[[Candidate], int],
    *,
    tries: int = 8,
) -> tuple[Candidate, int]:
    """The fastest candidate whose exact bytes are within the budget, and those bytes.

    Args:
        candidates: all ways to stream.
        budget_bytes: the most a step may hold; none for the fastest whatever it holds.
        exact_bytes: the peak of a candidate, found by trying.
        tries: how many to ask for it before going on with the smallest.

    Raises:
        PlanError: none fits; names the smallest budget found.
    """
    if not candidates:
        raise PlanError("there is no way to stream this network; its first operation needs the whole image")
    order = sorted(candidates, key=lambda c: c.time_s)
    if budget_bytes is None:
        return order[0], exact_bytes(order[0])
    hopeful = [c for c in order if c.rough_bytes <= 1.1 * budget_bytes][:tries]
    small = sorted(candidates, key=lambda c: c.rough_bytes)[:2]
    least: tuple[int, Candidate] | None = None
    for candidate in dict.fromkeys((*hopeful, *small)):
        found = exact_bytes(candidate)
        if found <= budget_bytes:
            return candidate, found
        if least is None or found < least[0]:
            least = (found, candidate)
    assert least is not None
    raise PlanError(
        f"streaming cannot meet a budget of {format_bytes(budget_bytes)}; the least found is {format_bytes(least[0])} "
        f"({least[1]}); give at least that"
    )
