"""Classes of tiles that compute the same, by where they lie along each axis.

Planning a tile walks all nodes of a stage. A slide has thousands of tiles and few *kinds*: in the middle, at an edge,
in a corner. Regions are boxes whose sides depend on one axis each, so one line of tiles along every axis, through the
middle of the image, shows all kinds:

    axis 1   ─ ─ ─ a b b b c ─ ─ ─      equivalent places along an axis get one letter, and
    axis 0         a b b b c            a tile's kind is its letter along each axis

Places are equivalent if sizes, cuts, padding and distance to the border are the same for every value of the stage; the
excess (`outcore.stream.execute.border_padding`) follows from these. Invariant: tiles of one kind run the same
arithmetic at shifted places, so the plan of the first of them serves all. Something whose result depends on the
absolute place (a random mask, a parameter for each pixel) makes every place different, and every tile its own kind.

Where a target lacks an axis along which others are cut, sides are not independent: tiles are then planned one by one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from outcore.ops.region import Region, sizes
from outcore.stream.execute.tile_dedup import signature
from outcore.stream.network import RegionNetwork
from outcore.stream.plan.passes import TilePass
from outcore.stream.plan.tiles import Grid, TilePlan, plan_tile

_PLANS = 64
"""Plans that are remembered for a stage."""


@dataclass(frozen=True, eq=False)
class StreamTile:
    """One tile: where it lies, and how it is computed."""

    number: tuple[int, ...]
    targets: Mapping[str, Region]
    """By target: its part of the map, or of a reduction's operand."""
    regions: Mapping[str, Region]
    """By source and by small global value: the region it reads."""
    kind: Hashable
    """Equal for tiles that compute the same with equal pixels."""
    of: TileClasses = field(repr=False)
    index: int = 0
    """Its place among the tiles of its pass, row by row."""

    @property
    def plan(self) -> TilePlan:
        """How tiles of its kind are computed; its regions are those of the first of them."""
        return self.of.plan(self)


@dataclass(frozen=True)
class _Place:
    """A place along one axis."""

    letter: int
    size: int
    """Equal for places whose tiles compute regions of the same sizes."""
    regions: Mapping[str, Region]
    """The regions read by the tile there, in the middle of the other axes."""


class TileClasses:
    """The tiles of one stage, by kind."""

    def __init__(self, network: RegionNetwork, stage: TilePass, cut: Grid) -> None:
        self.network, self.stage, self.cut = network, stage, cut
        self._plans: dict[Hashable, TilePlan] = {}

    def __iter__(self) -> Iterator[StreamTile]:
        """All tiles, row by row; those without a part in any target are left out."""
        return map(self.at, range(len(self.numbers)))

    @cached_property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        """The tiles that have a part in some target, row by row."""
        if self._lines is not None:  # all of them have
            return tuple(self.cut.tiles())
        values = set(self.stage.targets.values())
        return tuple(
            number
            for number in self.cut.tiles()
            if any(self.cut.region(self.network, value, number) is not None for value in values)
        )

    def at(self, index: int) -> StreamTile:
        """One of the tiles of `numbers`."""
        found = self.tile(self.numbers[index], index)
        assert found is not None
        return found

    def size(self, number: tuple[int, ...]) -> Hashable:
        """Equal for tiles that compute regions of the same sizes, and so take the same time and memory."""
        if self._lines is None:
            return number
        return tuple(line[k].size for line, k in zip(self._lines, number, strict=True))

    def tile(self, number: tuple[int, ...], index: int = 0) -> StreamTile | None:
        """One tile; None if it has no part in any target."""
        if self._lines is None:
            return self._single_tile(number, index)
        places = [line[k] for line, k in zip(self._lines, number, strict=True)]
        targets = {t: self.cut.region(self.network, value, number) for t, value in self.stage.targets.items()}
        moved = {name: self._region(name, places) for name in self.stage.sources if name in places[0].regions}
        kind = tuple(place.letter for place in places)
        regions = {**places[0].regions, **moved}
        return StreamTile(number, {t: r for t, r in targets.items() if r is not None}, regions, kind, self, index)

    def plan(self, tile: StreamTile) -> TilePlan:
        """How a tile is computed."""
        key = tile.number if self._lines is None else tile.kind
        if key not in self._plans:
            made = plan_tile(self.network, self.stage, self.cut, tile.number)
            assert made is not None
            self._remember(key, made)
        return self._plans[key]

    def _remember(self, key: Hashable, plan: TilePlan) -> None:
        while len(self._plans) >= _PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = plan

    def _single_tile(self, number: tuple[int, ...], index: int) -> StreamTile | None:
        plan = plan_tile(self.network, self.stage, self.cut, number)
        if plan is None:
            return None
        self._remember(number, plan)
        return StreamTile(number, plan.targets, self._read(plan), signature(self.stage, plan), self, index)

    def _region(self, name: str, places: list[_Place]) -> Region:
        """A region whose sides come from the places along each axis."""
        axes = self.network.axes[name]
        along = [0 if axis is None or axis >= len(places) else axis for axis in axes]
        return tuple(places[axis].regions[name][dim] for dim, axis in enumerate(along))

    @cached_property
    def _lines(self) -> list[list[_Place]] | None:
        """By axis, the places along it; None where sides are not independent."""
        counts, values = self.cut.counts, self.stage.targets.values()
        cut = {axis for axis, count in enumerate(counts) if count > 1}
        if not counts or any(cut - set(self.network.axes[v]) for v in values):
            return None
        lines = [self._line(axis) for axis in range(len(counts))]
        return [line for line in lines if line is not None] if None not in lines else None

    def _line(self, axis: int) -> list[_Place] | None:
        middle = [count // 2 for count in self.cut.counts]
        letters: dict[Hashable, int] = {}
        areas: dict[Hashable, int] = {}
        line = []
        for k in range(self.cut.counts[axis]):
            number = (*middle[:axis], k, *middle[axis + 1 :])
            plan = plan_tile(self.network, self.stage, self.cut, number, excess=False)
            if plan is None or len(plan.targets) < len(self.stage.targets):
                return None
            borders = self._borders(plan)
            letter = letters.setdefault((signature(self.stage, plan), borders), len(letters))
            area = tuple((v, sizes(r)) for v, r in plan.regions.items()), borders
            line.append(_Place(letter, areas.setdefault(area, len(areas)), self._read(plan)))
        return line

    def _read(self, plan: TilePlan) -> dict[str, Region]:
        names = (*self.stage.sources, *self.stage.smalls)
        return {name: plan.regions[name] for name in names if name in plan.regions}

    def _borders(self, plan: TilePlan) -> Hashable:
        """Which sides of which values lie at the border."""
        shapes = self.network.shapes
        return tuple(
            (a == 0, b == n) for v, region in plan.regions.items() for (a, b), n in zip(region, shapes[v], strict=True)
        )
