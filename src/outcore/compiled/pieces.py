"""The compiled pieces of a model share one budget.

Where Python cannot be traced, torch.compile breaks the graph: the model runs as several pieces, each with a joint graph
of its own, in the same order in every step. What a piece saves is held until its backward, which comes after those of
all later pieces. So the budget holds if for each piece what the ones before it hold, and its own peak, are within it.
When the first step runs, pieces appear one after the other, and each has what is left. Once all are known, they are
chosen together: from the fastest points of their frontiers, always the step down that costs least for what it brings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from outcore.compiled.joint_graph import JointGraph, Rates
from outcore.compiled.lifetimes import StepOfGraph, Way
from outcore.compiled.offload_graphs import Copies
from outcore.compiled.offload_ops import Reservation
from outcore.compiled.reserved import Allocator, choose_reserved
from outcore.compiled.search import Frontier, search
from outcore.compiled.times.host_times import host_and_device_s
from outcore.compiled.torch_partitioner import SavedChoice, TracedStep
from outcore.errors import OutcoreError

__all__ = [
    "Piece",
    "PieceChooser",
    "choice_of",
    "choose_all_reserved",
    "choose_together",
    "peak_of",
    "smaller",
    "within",
]

_COUNTABLE = 4096
_WORTH = 0.95
"""What a step in which values leave the device must take, by prediction, over one in which none does: for its sake all
of the graph is laid out as traced, and buffers are not used again, which no prediction has in it."""
_BLOCK = 512
"""What is copied out begins at multiples of this."""


@dataclass
class Piece:
    """One compiled piece of a model."""

    frontier: Frontier
    chosen: StepOfGraph
    names: tuple[str, ...]
    """Of its nodes, by which it is recognised in the next compilation."""
    again: int = 0
    """Values that the backward makes again."""

    @property
    def fastest(self) -> StepOfGraph:
        """The step that torch.compile would take by itself, or a faster one."""
        return self.frontier.points[0]

    @property
    def kept(self) -> tuple[frozenset[int], tuple[Way, ...]]:
        """What was chosen for it."""
        return self.chosen.saved, self.chosen.ways


def peak_of(points: Sequence[StepOfGraph]) -> int:
    """What the pieces hold at most when each runs as chosen."""
    before = most = 0
    for point in points:
        most = max(most, before + point.peak_bytes)
        before += point.forward_bytes
    return most


def seconds_of(points: Sequence[StepOfGraph], update_s: float = 0.0) -> float:
    """What a step takes.

    Args:
        points: its pieces.
        update_s: of the device, for the optimizer's own step.
    """
    host_s, device_s = sum(p.host_s for p in points), sum(p.device_s for p in points)
    more_s = host_and_device_s(host_s, device_s + update_s) - host_and_device_s(host_s, device_s)
    return sum(p.seconds for p in points) + more_s


def choose_together(frontiers: Sequence[Frontier], budget_bytes: int | None) -> list[StepOfGraph] | None:
    """The points of several frontiers that are within a budget together; none if there are none."""
    chosen = [0 for _ in frontiers]

    def points() -> list[StepOfGraph]:
        return [f.points[k] for f, k in zip(frontiers, chosen, strict=True)]

    if budget_bytes is None:
        return points()
    while (over := peak_of(points()) - budget_bytes) > 0:
        best: tuple[float, int, int] | None = None
        here = points()
        for number, frontier in enumerate(frontiers):
            for k in range(chosen[number] + 1, len(frontier.points)):
                there = [*here[:number], frontier.points[k], *here[number + 1 :]]
                gained = float(min(over, over - (peak_of(there) - budget_bytes)))
                gained = gained if gained > 0 else 1e-6 * (here[number].forward_bytes - there[number].forward_bytes)
                if gained <= 0:
                    continue
                price = (there[number].seconds - here[number].seconds) / gained
                if best is None or price < best[0]:
                    best = price, number, k
        if best is None:
            return _of_all(frontiers, budget_bytes)
        chosen[best[1]] = best[2]
    # What was taken too much on the way down is given back.
    for number, frontier in enumerate(frontiers):
        for k in range(chosen[number]):
            there = points()
            there[number] = frontier.points[k]
            if peak_of(there) <= budget_bytes:
                chosen[number] = k
                break
    return points()


def choose_all_reserved(
    frontiers: Sequence[Frontier], budget_bytes: int | None, allocator: Allocator | None
) -> list[StepOfGraph] | None:
    """The same, with what an allocator reserves beyond their peak."""
    if budget_bytes is None or allocator is None:
        return choose_together(frontiers, budget_bytes)
    return choose_reserved(lambda room: choose_together(frontiers, room), peak_of, allocator.overhead, budget_bytes)


def within(
    known: Sequence[Piece], budget_bytes: int | None, allocator: Allocator | None, *, staying_first: bool
) -> list[Piece] | None:
    """Pieces with what is chosen for them within a budget; none if there is no such choice.

    Args:
        known: the pieces.
        budget_bytes: for all.
        allocator: of a device where reserved memory counts.
        staying_first: let values leave the device only if nothing else is within the budget, where rates are too rough
            to say which is faster, a copy or making it again; otherwise where it saves some of the time, too.
    """

    def fits(points: list[StepOfGraph]) -> bool:
        reserved = 0 if allocator is None else allocator.overhead(points)
        return budget_bytes is None or peak_of(points) + reserved <= budget_bytes

    chosen = choose_all_reserved([p.frontier.without_copies() for p in known], budget_bytes, allocator)
    if chosen is None or not staying_first:
        moving = choose_all_reserved([p.frontier for p in known], budget_bytes, allocator)
        if chosen is None or moving is None or not fits(chosen) or seconds_of(moving) < _WORTH * seconds_of(chosen):
            chosen = moving
    return None if chosen is None else [replace(p, chosen=point) for p, point in zip(known, chosen, strict=True)]


def smaller(
    known: Sequence[Piece],
    budgets: Sequence[int],
    asked: Sequence[object],
    allocator: Allocator | None,
    *,
    staying_first: bool,
) -> list[Piece] | None:
    """The first choice that was not tried: of those within some budgets, in their order, then the smallest of all,
    before which nothing is refused; none if all were tried.

    Args:
        known: the pieces.
        budgets: to choose for.
        asked: what was kept of all pieces in choices that were tried.
        allocator: as in `within`.
        staying_first: as in `within`.
    """
    for budget in budgets:
        found = within(known, budget, allocator, staying_first=staying_first)
        if found is not None and [p.kept for p in found] not in asked:
            return found
    least = [replace(p, chosen=p.frontier.least) for p in known]
    return least if [p.kept for p in least] not in asked else None


def _of_all(frontiers: Sequence[Frontier], budget_bytes: int) -> list[StepOfGraph] | None:
    """The fastest of all choices that are within a budget, where they can be counted; else the smallest, if it is."""
    choices: Iterable[tuple[StepOfGraph, ...]] = itertools.product(*(f.points for f in frontiers))
    if math.prod(len(f.points) for f in frontiers) > _COUNTABLE:
        holding = (min(f.points, key=lambda p: p.forward_bytes) for f in frontiers)
        choices = (tuple(f.least for f in frontiers), tuple(holding))
    fitting = [choice for choice in choices if peak_of(choice) <= budget_bytes]
    best = min(fitting, key=lambda choice: sum(p.seconds for p in choice), default=None)
    return None if best is None else list(best)


def choice_of(graph: JointGraph, chosen: StepOfGraph) -> SavedChoice:
    """A step as torch's partitioner takes it."""

    def name(number: int | None) -> str | None:
        return None if number is None else graph.nodes[number].name

    copies = [Copies(graph.nodes[way.value].name, name(way.free_after), name(way.fetch_before)) for way in chosen.ways]
    return SavedChoice([graph.nodes[i] for i in sorted(chosen.saved | chosen.inputs)], tuple(copies))


class PieceChooser:
    """Answers torch's partitioner, piece by piece."""

    def __init__(
        self,
        budget_bytes: int | None,
        rates: Rates,
        known: Sequence[Piece] = (),
        loss_bytes: int = 0,
        reservation: Reservation | None = None,
        copies: bool | None = True,
        allocator: Allocator | None = None,
    ) -> None:
        self.budget_bytes, self.rates, self.loss_bytes = budget_bytes, rates, loss_bytes
        self.allocator = allocator
        """Of a device where reserved memory counts."""
        self.copies, self.needs_copies = copies, False
        """Whether values may leave the device; none for only if nothing else is within the budget."""
        self.ends = True
        """Whether compiling then ends and begins anew, with other options of Inductor."""
        self.reservation = reservation
        """Room for what leaves the device."""
        self.known = list(known)
        """Of a compilation before, with what was chosen for them together."""
        self.pieces: list[Piece] = []
        self.look: Callable[[TracedStep], None] | None = None
        """Is shown every joint graph before it is chosen for."""

    def __call__(self, partition: TracedStep) -> SavedChoice:
        """What is saved of a joint graph."""
        if self.look is not None:
            self.look(partition)
        graph = JointGraph(partition, self.rates)
        names = tuple(node.name for node in graph.nodes)
        number = len(self.pieces)
        before = self.known[number] if number < len(self.known) and self.known[number].names == names else None
        frontier = before.frontier if before is not None else search(graph, loss_bytes=self.loss_bytes)
        chosen = before.chosen if before is not None else self._alone(frontier)
        self.pieces.append(Piece(frontier, chosen, names, sum(graph.is_forward[i] for i in chosen.again)))
        if self.reservation is not None:
            sent = [piece.chosen for piece in self.pieces]
            self.reservation.at_least(sum(p.offloaded_bytes + _BLOCK * len(p.ways) for p in sent))
        return choice_of(graph, chosen)

    def restart(self) -> None:
        """The next piece is the first of a step again: what is compiled once more is chosen as before."""
        if self.pieces:
            self.known, self.pieces = self.pieces, []

    def _alone(self, frontier: Frontier) -> StepOfGraph:
        """The choice for a piece while nothing is known of the next ones."""
        if self.budget_bytes is None:
            return (frontier if self.copies else frontier.without_copies()).points[0]
        room = self.budget_bytes - sum(piece.chosen.forward_bytes for piece in self.pieces)
        here = frontier if self.copies else frontier.without_copies()
        chosen = self._within(here, room)
        if chosen is None and self.copies is None and (away := self._within(frontier, room)) is not None:
            self.needs_copies = True
            if self.ends:
                raise OutcoreError("only steps in which values leave the device are within the budget")
            return away
        return chosen or here.least

    def _within(self, frontier: Frontier, room: int) -> StepOfGraph | None:
        """The fastest step of a frontier for which there is room, beside the pieces before."""
        if (allocator := self.allocator) is None:
            return frontier.within(room)
        before = [piece.chosen for piece in self.pieces]
        return choose_reserved(
            frontier.within, lambda step: step.peak_bytes, lambda step: allocator.overhead([*before, step]), room
        )
