"""Which region of every value each rank computes, and what it gets from others.

Going backwards from what is wanted, a node's region on a rank is what its readers there need. Where that reaches beyond
the rank's own part there are two ways: the rank computes the wider region itself, from a still wider region of the
operands, or it computes its own part and the missing *halo* comes from the neighbours that own it. Cheap operations
(element-wise ones, norms, joins, interpolation) are always computed wide; the output of a convolution or a pool is
exchanged, unless it is among the values that the plan computes twice.

    conv (own part) ── exchange ──▶ own part + halo ──▶ norm, ReLU on all of it ──▶ conv (own part)

So a value is exchanged at the place where it is made, once for all its readers, and before anything that autograd
saves: what a norm or a ReLU keeps for backward is the wide tensor that the next convolution reads, not a second copy.

The borders of an *early* value are computed before the rest of the part and are on their way while that is computed;
they are computed once more with it, which costs less than to put the part together from pieces.

    border strips ── send ──▶ all of the own part ── wait, put together ──▶ own part + halo

Everything here is integer arithmetic on static sizes: every rank derives the regions of all ranks, so both ends of
every message know of it. Gradients follow by linearity. What a rank holds of a gradient is a *partial sum*: the sum
over all ranks (over all copies of an element, and over replicated small values) is the true gradient.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from outcore.ops.region import Region, cover, elements
from outcore.spatial.extent import SplitExtent
from outcore.spatial.parts import PartGrid, contains, intersection
from outcore.stream.call import widening_rule
from outcore.stream.execute.border_padding import WidenedInput
from outcore.stream.network import RegionNetwork, RegionNode
from outcore.stream.rules.along_dims import Along
from outcore.stream.rules.convolve import Kernel
from outcore.stream.rules.normalise import Apply
from outcore.stream.rules.pool import AdaptiveAverage, AveragePool, MaxPool

__all__ = ["Exchange", "RankRegions", "SplitLayout", "is_heavy", "lay_out"]


@dataclass
class RankRegions:
    """The regions of one rank."""

    made: dict[str, Region] = field(default_factory=dict)
    """By value: what it computes, excess at a border included."""
    held: dict[str, Region] = field(default_factory=dict)
    """By value: what its readers see; of an exchanged value, own part and halo."""
    needs: dict[str, tuple[Region, ...]] = field(default_factory=dict)
    """By node: the regions of its operands."""
    widened: dict[str, WidenedInput] = field(default_factory=dict)
    """By node: how it runs on all that is held of its first operand."""


@dataclass(frozen=True)
class Exchange:
    """One value's way from its owners to those who need it."""

    value: str
    number: int
    """Names its messages."""
    own: tuple[Region | None, ...]
    """By rank: what it gives."""
    wanted: tuple[Region | None, ...]
    """By rank: what it gets, its own included."""
    graded: frozenset[int]
    """Ranks whose copy has a gradient."""

    def piece(self, source: int, target: int) -> Region | None:
        """What one rank gives another."""
        return intersection(self.own[source], self.wanted[target])

    def elements(self, source: int) -> int:
        """How many numbers a rank sends."""
        pieces = (self.piece(source, target) for target in range(len(self.own)) if target != source)
        return sum(elements(p) for p in pieces if p is not None)


@dataclass(frozen=True)
class SplitLayout:
    """The regions of all ranks."""

    network: RegionNetwork
    grid: PartGrid
    extent: SplitExtent
    ranks: tuple[RankRegions, ...]
    exchanges: dict[str, Exchange]
    """By value."""
    completed: dict[str, tuple[str, ...]]
    """By node: the exchanges that must be complete before it runs, the same on all ranks."""
    gathers: dict[str, Exchange]
    """How values of the boundary become whole."""
    borders: dict[str, tuple[tuple[Region, ...], ...]] = field(default_factory=dict)
    """By early value, by rank: the strips that are computed ahead of the rest."""
    twice: frozenset[str] = frozenset()
    """Values whose halo is computed on both sides, although an exchange would be the rule."""

    @property
    def positions(self) -> dict[str, int]:
        """A number for each node, from which the names of its messages follow."""
        return {node.output: i for i, node in enumerate(self.extent.nodes)}

    def overlaps(self, node: RegionNode) -> bool:
        """Whether a node makes or reads a value whose halo is computed on both sides."""
        return not self.twice.isdisjoint((node.output, *node.values))

    def shares(self, node: RegionNode) -> list[float]:
        """The part of a node's work on the whole image that each rank does."""
        if node.kind == "reduction":
            source = node.values[0]
            regions, whole = self.grid.owners(self.network, source), math.prod(self.network.shapes[source])
        elif node.kind == "local":
            regions, whole = [r.made.get(node.output) for r in self.ranks], math.prod(node.shape)
        else:
            return [1.0] * len(self.ranks)
        return [0.0 if r is None else min(1.0, elements(r) / max(1, whole)) for r in regions]


def is_heavy(node: RegionNode) -> bool:
    """Whether a node costs so much that its halo is exchanged and not computed twice."""
    rule = node.rule
    linear = isinstance(rule, Along) and bool(rule.others)
    return linear or isinstance(rule, Kernel | MaxPool | AveragePool | AdaptiveAverage)


def lay_out(
    network: RegionNetwork,
    extent: SplitExtent,
    grid: PartGrid,
    *,
    twice: Collection[str] = (),
    early: Collection[str] | None = (),
    whole_on: Collection[int] = (0,),
) -> SplitLayout:
    """The regions of all ranks.

    Args:
        network: the nodes.
        extent: those that run on parts.
        grid: the ranks.
        twice: values whose halo is computed on both sides, although an exchange would be the rule.
        early: exchanged values whose borders are computed and sent ahead of the rest; None for all of them.
        whole_on: the ranks that get the values of the boundary whole; the first of them has their gradient. None, where
            the boundary stays in parts, each with a gradient of its own.
    """
    count = len(grid)
    ranks = tuple(RankRegions() for _ in range(count))
    owners = {n.output: grid.owners(network, n.output) for n in extent.nodes}
    owners |= {v: grid.owners(network, v) for v in network.graph.inputs}
    for v in extent.boundary:
        if network.is_streamed(v):
            _want(ranks, v, owners[v])
    exchanged: list[tuple[str, tuple[Region | None, ...]]] = []
    overlapped: set[str] = set()
    for node in reversed(extent.nodes):
        if node.kind == "reduction":
            _want(ranks, node.values[0], owners[node.values[0]])
        if node.kind != "local":
            continue
        small = not network.is_streamed(node.output)
        if small:  # one pixel: every rank computes it, as it does what follows
            _want(ranks, node.output, list(_whole(network, node.output, count, range(count))))
        wanted = tuple(r.held.get(node.output) for r in ranks)
        outside = not all(contains(o, w) for o, w in zip(owners[node.output], wanted, strict=True))
        ruled = outside and not small and is_heavy(node)
        exchange = ruled and node.output not in twice
        if exchange:
            exchanged.append((node.output, wanted))
        elif ruled:
            overlapped.add(node.output)
        for rank, regions in enumerate(ranks):
            own = owners[node.output][rank]
            out = own if exchange else wanted[rank]
            if isinstance(node.rule, Apply) and own is not None:
                # The gradient through statistics goes to all of the own part, also where nobody reads the norm.
                out = regions.held[node.output] = cover(out, own)
            if out is not None:
                _compute(network, node, regions, out)
    names = [name for name, _ in exchanged]
    for regions in ranks:
        _widen(extent, regions, names)
    needed = dict(reversed(exchanged))
    everyone = frozenset(range(count))
    at = {node.output: i for i, node in enumerate(extent.nodes)}
    exchanges = {v: Exchange(v, 4 * at[v], tuple(owners[v]), w, everyone) for v, w in needed.items()}
    gathers = {
        v: Exchange(v, 4 * at[v] + 2, tuple(owners[v]), _whole(network, v, count, whole_on), frozenset({min(whole_on)}))
        for v in (extent.boundary if whole_on else ())
        if network.is_streamed(v)
    }
    completed = _completions(extent, exchanges, ranks)
    borders = {v: _borders(e) for v, e in exchanges.items() if early is None or v in early}
    return SplitLayout(network, grid, extent, ranks, exchanges, completed, gathers, borders, frozenset(overlapped))


def _want(ranks: tuple[RankRegions, ...], value: str, regions: list[Region | None]) -> None:
    for rank, region in zip(ranks, regions, strict=True):
        if region is not None:
            rank.held[value] = cover(rank.held.get(value), region)


def _compute(network: RegionNetwork, node: RegionNode, regions: RankRegions, out: Region) -> None:
    assert node.rule is not None
    regions.made[node.output] = out
    regions.needs[node.output] = found = node.rule.needs(out)
    for ref, region in zip(node.operands, found, strict=True):
        if ref.kind == "value" and network.is_streamed(ref.name):
            regions.held[ref.name] = cover(regions.held.get(ref.name), region)


def _widen(extent: SplitExtent, regions: RankRegions, exchanged: Collection[str]) -> None:
    """Let nodes run on all that is held of their first operand where that saves a copy."""
    for node in extent.nodes:
        rule, needs = widening_rule(node.rule), regions.needs.get(node.output)
        if rule is None or needs is None or node.operands[0].kind != "value":
            continue
        held = regions.held[node.operands[0].name]
        widened = rule.widened(held, regions.made[node.output])
        if widened is None or any(r.kind == "value" for r in node.operands[1:]):
            continue
        regions.needs[node.output] = (held, *needs[1:])
        regions.made[node.output], regions.widened[node.output] = widened.out, widened
        if node.output not in exchanged:
            regions.held[node.output] = widened.out


def _whole(network: RegionNetwork, value: str, count: int, whole_on: Collection[int]) -> tuple[Region | None, ...]:
    region = tuple((0, n) for n in network.shapes[value])
    return tuple(region if rank in whole_on else None for rank in range(count))


def _borders(exchange: Exchange) -> tuple[tuple[Region, ...], ...]:
    """By rank, the pieces that others get of a value, without those that lie inside another."""
    found = []
    for rank in range(len(exchange.own)):
        others = (exchange.piece(rank, target) for target in range(len(exchange.own)) if target != rank)
        pieces = sorted({p for p in others if p is not None}, key=elements, reverse=True)
        kept: list[Region] = []
        for piece in pieces:
            if not any(contains(other, piece) for other in kept):
                kept.append(piece)
        found.append(tuple(kept))
    return tuple(found)


def _completions(
    extent: SplitExtent, exchanges: dict[str, Exchange], ranks: tuple[RankRegions, ...]
) -> dict[str, tuple[str, ...]]:
    """An exchange is complete before its first reader on any rank; statistics read own parts, and do not wait."""
    waiting = set(exchanges)
    found: dict[str, tuple[str, ...]] = {}
    for node in extent.nodes:
        reads = {v for v in node.values if v in waiting} if node.norm is None else set()
        if reads:
            found[node.output] = tuple(sorted(reads))
            waiting -= reads
    return found
