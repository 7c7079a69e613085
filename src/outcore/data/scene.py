"""A synthetic slide or volume as a formula: any region of any level can be computed, so it is its own oracle.

Two pieces of tissue lie apart on glass. Each is of one of two kinds, and the label says whether the kinds differ. The
pieces are at least an eighth of the image apart (`Scene.gap`), so a window narrower than the gap sees at most one of
them. With both kinds equally likely for each piece, whatever such a window shows is then equally likely under both
labels: **no classifier of patches can do better than chance**, however many patches it sees one by one. Only what joins
both pieces of one image can.

Every tile of tissue is one of a few patterns, chosen by a hash of its place, so that no larger part of the image
repeats itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from outcore.data.patterns import VARIANTS, patterns
from outcore.data.source import Region, Span, spans
from outcore.errors import DataError

Pixels = np.ndarray[Any, Any]

GLASS = 3
"""What lies at a place: a kind of tissue, or this."""
_HALF_GAP = 1 / 16
_WIDEST = (0.5 - _HALF_GAP) / 2
_SUPERELLIPSE = math.gamma(1.25) ** 2 / math.gamma(1.5), math.gamma(1.25) ** 3 / math.gamma(1.75)
"""Share of its box that |x|^4 + |y|^4 (+ |z|^4) <= 1 fills."""
_REDUCE = 4
"""From one level of the pyramid to the next."""


@dataclass(frozen=True)
class Scene:
    """Two pieces of tissue on glass.

    >>> scene = Scene((4096, 4096), kinds=(0, 1))
    >>> scene.label, scene.gap >= 512, scene.region([(0, 512), (0, 512)]).shape
    (1, True, (512, 512, 3))

    Args:
        size: height and width, or depth, height and width, in pixels.
        kinds: of the piece on the left and on the right; drawn from the seed when not given.
        share: of the image that is tissue, above 0 and at most 1. Beyond 0.8 the glass is filled with tissue that
            no label depends on.
        seed: of the places of pieces and patterns.
        tile: size of a pattern; the tiles of a file are as large.
        microns_per_pixel: of the finest level.
    """

    size: tuple[int, ...]
    kinds: tuple[int, int] | None = None
    share: float = 0.2
    seed: int = 0
    tile: int = 512
    microns_per_pixel: float = 0.25

    def __post_init__(self) -> None:
        if len(self.size) not in (2, 3) or min(self.size) < 8:
            raise DataError(f"a scene of size {self.size} was asked for; it has two or three sides of 8 or more")
        if not 0 < self.share <= 1:
            raise DataError(f"share={self.share} was asked for; it lies above 0 and at most at 1")
        if self.tile < 16 or self.tile & (self.tile - 1):
            raise DataError(f"tile={self.tile} was asked for; it is a power of two, 16 or more")
        if self.kinds is None:
            drawn = np.random.default_rng([self.seed, 1]).integers(0, 2, 2)
            object.__setattr__(self, "kinds", (int(drawn[0]), int(drawn[1])))

    @property
    def label(self) -> int:
        """One if the two pieces are of different kinds."""
        assert self.kinds is not None
        return int(self.kinds[0] != self.kinds[1])

    @property
    def channels(self) -> int:
        """Three colours on a slide, one density in a volume."""
        return 3 if len(self.size) == 2 else 1

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The size of every level; each is a quarter of the one before."""
        made = [self.size]
        while len(self.size) == 2 and max(made[-1]) > 1024 and _REDUCE ** len(made) <= self.tile // 2:
            made.append(tuple(max(1, n // _REDUCE ** len(made)) for n in self.size))
        return tuple(made)

    @property
    def gap(self) -> int:
        """A window at most this wide sees at most one piece."""
        return math.floor(2 * (_HALF_GAP + _WIDEST - self.radii[-1]) * self.size[-1])

    @property
    def _reached(self) -> float:
        """The largest share that two pieces can have."""
        return 4 * _WIDEST * _SUPERELLIPSE[len(self.size) - 2]

    @cached_property
    def radii(self) -> tuple[float, ...]:
        """Half the sides of a piece, as shares of the sides of the image."""
        dims = len(self.size)
        shrink = min(1.0, self.share / self._reached) ** (1 / dims)
        return (*(0.5 * shrink for _ in range(dims - 1)), _WIDEST * shrink)

    @cached_property
    def _centres(self) -> tuple[tuple[float, ...], ...]:
        """One on the left and one on the right, moved along the other sides as far as there is room."""
        random = np.random.default_rng([self.seed, 2])
        made = []
        for side in (-1, 1):
            along = [0.5 + float(random.uniform(-1, 1)) * (0.5 - radius) for radius in self.radii[:-1]]
            made.append((*along, 0.5 + side * (_HALF_GAP + _WIDEST)))
        return tuple(made)

    def what(self, region: Region, level: int = 0) -> Pixels:
        """For every pixel of a region which kind of tissue it shows, or `GLASS`."""
        box = spans(region, self.levels[level])
        scale = _REDUCE**level
        positions = [(np.arange(a, b) + 0.5) * scale / n for (a, b), n in zip(box, self.size, strict=True)]
        found = np.full([b - a for a, b in box], GLASS, np.uint8)
        assert self.kinds is not None
        for kind, centre in zip(self.kinds, self._centres, strict=True):
            terms = [_fourth((p - c) / r) for p, c, r in zip(positions, centre, self.radii, strict=True)]
            found[np.asarray(sum(np.ix_(*terms))) <= 1] = kind
        fill = self._filled(box, scale)
        return found if fill is None else np.where((found == GLASS) & fill, np.uint8(2), found)

    def uniform(self, box: Sequence[Span], level: int = 0) -> int | None:
        """What a whole box shows, if it shows one thing: the same answer as `what`, without looking at every pixel.

        The sum of fourth powers that decides is largest and smallest where each of its terms is.
        """
        scale = _REDUCE**level
        found = GLASS
        assert self.kinds is not None
        for kind, centre in zip(self.kinds, self._centres, strict=True):
            least = most = 0.0
            for (a, b), n, c, r in zip(box, self.size, centre, self.radii, strict=True):
                nearest = min(max(math.floor(c * n / scale), a), b - 1)
                near = [_fourth(((i + 0.5) * scale / n - c) / r) for i in {nearest, max(nearest - 1, a)}]
                ends = [_fourth(((i + 0.5) * scale / n - c) / r) for i in (a, b - 1)]
                least, most = least + min(*near, *ends), most + max(ends)
            if most <= 1:
                return kind
            if least <= 1:
                return None
        if self.share > self._reached:
            tiled = level == 0 and all(a % self.tile == 0 and b - a <= self.tile for a, b in box)
            return int(self.what([(a, a + 1) for a, _ in box]).item()) if tiled else None
        return found

    def mask(self, region: Region, level: int = 0) -> Pixels:
        """The right answer for segmentation: 0 glass, 1 and 2 the two kinds, 3 other tissue."""
        return np.array([1, 2, 3, 0], np.uint8)[self.what(region, level)]

    def region(self, region: Region, level: int = 0) -> Pixels:
        """The pixels of a region of a level, channels last."""
        box = spans(region, self.levels[level])
        small = self.tile // _REDUCE**level
        kinds = self.what(box, level)
        tiles = np.ix_(*(np.arange(a, b) // small for a, b in box))
        inside = np.ix_(*(np.arange(a, b) % small for a, b in box))
        choice = np.minimum(kinds, 2).astype(np.int64) * VARIANTS + self.variant(tiles)
        drawn = patterns(len(self.size), self.tile, _REDUCE**level)[(choice, *inside)]
        return np.where((kinds == GLASS)[..., None], np.uint8(self.blank), drawn)

    @property
    def blank(self) -> int:
        """Glass is white; empty space is zero."""
        return 255 if len(self.size) == 2 else 0

    def variant(self, tiles: Sequence[Pixels]) -> Pixels:
        """Which of the patterns each tile has, by a hash of its place."""
        return self._hash(tiles, 0) % VARIANTS

    def _hash(self, tiles: Sequence[Pixels], salt: int) -> Pixels:
        mixed: Any = np.uint64((self.seed * 2 + salt + 1) * 0x9E3779B97F4A7C15 % 2**64)
        for place in tiles:
            with np.errstate(over="ignore"):
                mixed = (mixed ^ place.astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
                mixed = mixed ^ (mixed >> np.uint64(29))
        return (np.asarray(mixed) >> np.uint64(8)).astype(np.int64)

    def _filled(self, box: Sequence[Span], scale: int) -> Pixels | None:
        """Where the glass is covered by other tissue, for shares that the two pieces cannot reach."""
        if self.share <= self._reached:
            return None
        wanted = (self.share - self._reached) / (1 - self._reached)
        tiles = np.ix_(*(np.arange(a, b) * scale // self.tile for a, b in box))
        return np.asarray(self._hash(tiles, 1) % 4096 < wanted * 4096)


def _fourth(x: Any) -> Any:
    square = x * x
    return square * square
