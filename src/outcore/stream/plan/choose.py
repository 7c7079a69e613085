"""Where streaming stops, how large tiles are and which maps are kept: the fastest step within a budget.

Every *candidate* says what is streamed (up to which boundary), how large its tiles are, which maps between passes are
kept and where, how the untiled tail is held for backward, how long a step would take and roughly how much it would
hold. Deep boundaries hold little but pay for wide halos twice; shallow ones leave more to run untiled. Large tiles
waste less on halos and hold more. A kept map saves running what is before it in every later pass. Candidates are tried
from the fastest on; exact bytes, which take a second each to find, are computed only where rough ones, corrected by the
error seen for the same kind, may fit.

Computing a candidate's time walks the network, too; a lower bound is known at once. `OrderedCandidates` gives
candidates from the fastest on and evaluates only those whose lower bound has been reached, so most never are.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from outcore.errors import PlanError
from outcore.machine.units import format_bytes, rounded_up

_HOPE = 1.05
"""A candidate is tried if its rough bytes are at most so many times the budget."""


@dataclass(frozen=True)
class TileCandidate:
    """One way to stream."""

    boundary: tuple[str, ...] | None
    """Blocks after which streaming stops; None for as far as it goes."""
    tile: tuple[int, ...]
    """Input pixels per tile, without halo."""
    time_s: float
    """Seconds of a step: forward passes, backward pass and the untiled tail."""
    rough_bytes: int
    """Peak of a step, by proportion."""
    keep: tuple[str, ...] = ()
    """Maps that later passes start from."""
    on_host: bool = False
    """Whether those are kept in host memory."""
    managed: bool = False
    """Whether the untiled tail runs under policies for its saved tensors."""

    @property
    def kind(self) -> Hashable:
        """Candidates with equal kinds have the same error factor of rough bytes."""
        return self.boundary, self.keep, self.on_host, self.managed

    def __str__(self) -> str:
        where = "as far as it goes" if self.boundary is None else f"to {', '.join(self.boundary)}"
        kept = f", {len(self.keep)} maps kept{' on the host' if self.on_host else ''}" if self.keep else ""
        rest = ", the rest under policies" if self.managed else ""
        return f"{where} in tiles of {' x '.join(map(str, self.tile))} px{kept}{rest}: {self.time_s:.3g} s"


@dataclass(frozen=True)
class CandidateOutline:
    """Candidates that are not evaluated yet."""

    least_s: float
    """A lower bound of their times."""
    least_bytes: int
    """A lower bound of their rough bytes."""
    candidates: Callable[[], Iterable[TileCandidate]]


class OrderedCandidates:
    """Candidates from the fastest on, worked out as late as can be.

    >>> slow = CandidateOutline(3.0, 0, lambda: [TileCandidate(None, (8,), 4.0, 9)])
    >>> fast = CandidateOutline(1.0, 0, lambda: [TileCandidate(None, (16,), 2.0, 9)])
    >>> next(iter(OrderedCandidates([slow, fast]))).tile
    (16,)
    """

    def __init__(self, outlines: Iterable[CandidateOutline]) -> None:
        self._order = itertools.count()  # of equal ones, the first
        self._waiting: list[tuple[float, int, CandidateOutline | TileCandidate]] = []
        self._found: list[TileCandidate] = []
        for outline in outlines:
            self._push(outline.least_s, outline)

    def __iter__(self) -> Iterator[TileCandidate]:
        for number in itertools.count():
            while number >= len(self._found):
                if not self._waiting:
                    return
                _, _, first = heapq.heappop(self._waiting)
                if isinstance(first, TileCandidate):
                    self._found.append(first)
                else:
                    for candidate in first.candidates():
                        self._push(candidate.time_s, candidate)
            yield self._found[number]

    def __bool__(self) -> bool:
        return bool(self._waiting or self._found)

    def _push(self, time_s: float, what: CandidateOutline | TileCandidate) -> None:
        heapq.heappush(self._waiting, (time_s, next(self._order), what))


def worth(outlines: Sequence[CandidateOutline], budget_bytes: int | None) -> list[CandidateOutline]:
    """The outlines that `choose` may try for a budget; all if there is none.

    It tries rough bytes of up to `_HOPE` budgets, times a factor of candidates that did not fit, which is no less than
    one over that.
    """
    if budget_bytes is None:
        return list(outlines)
    return [o for o in outlines if o.least_bytes <= _HOPE**2 * budget_bytes] or list(outlines)


def choose(
    candidates: Sequence[TileCandidate] | OrderedCandidates,
    budget_bytes: int | None,
    exact_bytes: Callable[[TileCandidate], int],
    *,
    margin: float = 0.0,
    tries: int = 10,
) -> tuple[TileCandidate, int]:
    """The fastest candidate whose exact bytes are within the budget, and those bytes.

    Args:
        candidates: all ways to stream.
        budget_bytes: the most a step may hold; none for the fastest whatever it holds.
        exact_bytes: the peak of a candidate, found by trying.
        margin: share of the budget to leave free.
        tries: how many to ask for it in good hope, and as many again with care, before going on with the smallest.

    Raises:
        PlanError: none fits; names the smallest budget found.
    """
    if not candidates:
        raise PlanError("there is no way to stream this network; its first operation needs the whole image")
    order = candidates if isinstance(candidates, OrderedCandidates) else sorted(candidates, key=lambda c: c.time_s)
    if budget_bytes is None:
        first = next(iter(order))
        return first, exact_bytes(first)
    usable = int(budget_bytes * (1 - margin))
    found: dict[TileCandidate, int] = {}
    factors: dict[Hashable, float] = {}
    """By kind, the error factor of the rough bytes when last computed."""
    for unknown in ("hope", "fear"):
        for candidate in order:
            usual = 1.0 if unknown == "hope" else max(factors.values(), default=1.0)
            rough = candidate.rough_bytes * factors.get(candidate.kind, usual)
            if candidate in found or rough > _HOPE * usable:
                continue
            if len(found) >= tries * (1 if unknown == "hope" else 2):
                break
            found[candidate] = exact_bytes(candidate)
            if found[candidate] <= usable:
                return candidate, found[candidate]
            factors[candidate.kind] = found[candidate] / candidate.rough_bytes
    for candidate in sorted(order, key=lambda c: c.rough_bytes * factors.get(c.kind, 1.0))[:2]:
        found.setdefault(candidate, exact_bytes(candidate))
    fitting = [c for c, size in found.items() if size <= usable]
    if fitting:
        best = min(fitting, key=lambda c: c.time_s)
        return best, found[best]
    least = min(found, key=lambda c: found[c])
    needed = math.ceil(found[least] / (1 - margin))
    refused = PlanError(
        f"streaming cannot meet a budget of {format_bytes(budget_bytes)}; the least found is "
        f"{format_bytes(needed)} ({least}); "
        f'give memory="{rounded_up(needed)}" or more'
    )
    refused.least_bytes = needed
    raise refused
