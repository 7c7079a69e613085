"""A slide or volume: levels of one image in a file, read by region, and a lazy tensor for a network.

A `Slide` is a value: a path and how to treat damage. It opens its file when first read, in each process for itself
(so it can be sent to the workers of a loader), and shares one bounded cache of decoded tiles with all other slides.
As a `Source` it is its finest level, ``(channels, height, width)``; `Slide.at` is another level or another number of
microns per pixel.

A tile that cannot be decoded is named with its file, level and place. What happens then was chosen when the slide
was opened: ``"raise"`` stops there; ``"white"`` reads it as glass, and counts it in `Slide.damage`.

Most of a slide is glass, or was never scanned. A tile of one colour is decoded once: from then on its colour describes
all of it (`Slide.colour`). What is known is one small number for each tile of the file, two bytes, so it can be kept
for all slides of a data set: an epoch later the glass is not read again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from outcore.data.cache import handles, tile_cache
from outcore.data.limits import check_layout
from outcore.data.reader import FileLayout, Pixels, PyramidLevel, Reader
from outcore.data.resample import Resampled
from outcore.data.source import Region, Source, Span, spans
from outcore.errors import DataError

OnDamage = Literal["raise", "white"]

_tokens = itertools.count()


@dataclass(frozen=True)
class DamagedTile:
    """A tile that could not be read, and why."""

    name: str
    level: int
    index: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        place = ", ".join(map(str, self.index))
        return f"{self.name}: tile ({place}) of level {self.level} cannot be read: {self.reason}"


class Slide:
    """An image in a file, in levels.

    Made by `outcore.data.open_slide`.

    Attributes:
        name: where it came from, as messages say it.
        damage: the tiles that were read as glass because they could not be decoded.
    """

    def __init__(self, name: str, opened: Callable[[], Reader], *, on_damage: OnDamage = "raise") -> None:
        if on_damage not in ("raise", "white"):
            raise DataError(f"on_damage={on_damage!r} is not known; say 'raise' or 'white'")
        self.name = name
        self.on_damage = on_damage
        self.damage: list[DamagedTile] = []
        self._opened = opened
        self._layout: FileLayout | None = None
        self._colours: Colours | None = None
        self._begin()

    def _begin(self) -> None:
        """Set up what belongs to this process only; the token separates its tiles from those of a slide that was
        closed."""
        self._lock = threading.Lock()
        self._token = next(_tokens)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_lock", "_token", "_colours")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._colours = None
        self._begin()

    def __repr__(self) -> str:
        layout = self.layout
        sizes = ", ".join(" x ".join(map(str, level.size[::-1])) for level in layout.levels)
        microns = f", {layout.microns_per_pixel:.4g} µm per pixel" if layout.microns_per_pixel else ""
        return f"Slide({self.name}: {sizes}; {layout.channels} channels of {layout.dtype}{microns})"

    @property
    def layout(self) -> FileLayout:
        """Levels, channels and dtype; opens the file the first time."""
        if self._layout is None:
            layout = self._reader().layout
            check_layout(self.name, layout)
            self._layout = layout
        return self._layout

    @property
    def levels(self) -> tuple[PyramidLevel, ...]:
        """From the finest to the coarsest."""
        return self.layout.levels

    @property
    def microns_per_pixel(self) -> float | None:
        """Of the finest level, where the file says it."""
        return self.layout.microns_per_pixel

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels and size of the finest level."""
        return (self.layout.channels, *self.levels[0].size)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its pixels."""
        return torch.from_numpy(np.empty(0, self.layout.dtype)).dtype

    def read(self, region: Region) -> Tensor:
        """One box of the finest level."""
        return self.at(level=0).read(region)

    def colour(self, region: Region) -> Colour | None:
        """The one colour of a box of the finest level, where that is known without reading it."""
        return SlideLevel(self, 0).colour(region)

    def at(self, *, level: int | None = None, microns_per_pixel: float | None = None) -> Source:
        """One magnification as a source: a level of the file, or the nearest finer one resampled.

        Raises:
            DataError: the level is not there, or the file does not say its resolution or is coarser than asked.
        """
        if (level is None) == (microns_per_pixel is None):
            raise DataError("say either level=0 or microns_per_pixel=0.5")
        if level is not None:
            if not 0 <= level < len(self.levels):
                raise DataError(f"{self.name} has levels 0 to {len(self.levels) - 1}; level {level} was asked for")
            return SlideLevel(self, level)
        assert microns_per_pixel is not None
        finest = self.microns_per_pixel
        if finest is None:
            raise DataError(f"{self.name} does not say its microns per pixel; ask for a level: level=0")
        if microns_per_pixel < finest * 0.999:
            raise DataError(f"{self.name} has {finest:.4g} µm per pixel; {microns_per_pixel:.4g} is finer than scanned")
        wanted = max(1.0, microns_per_pixel / finest)
        best = max(i for i, here in enumerate(self.levels) if here.downsample <= wanted * 1.001)
        factor = wanted / self.levels[best].downsample
        return SlideLevel(self, best) if abs(factor - 1) < 2e-3 else Resampled(SlideLevel(self, best), factor)

    def region(
        self,
        corner: Sequence[int],
        size: Sequence[int],
        *,
        level: int | None = None,
        microns_per_pixel: float | None = None,
    ) -> Tensor:
        """A box by its corner and size, in pixels of the magnification asked for; white beyond the border."""
        chosen = 0 if level is None and microns_per_pixel is None else level
        source = self.at(level=chosen, microns_per_pixel=microns_per_pixel)
        extent = source.shape[1:]
        if not len(corner) == len(size) == len(extent):
            raise DataError(
                f"{self.name} has {len(extent)} dimensions; corner {corner} and size {size} must have as many"
            )
        out = torch.full((source.shape[0], *size), self.blank, dtype=source.dtype, device="cpu")
        inside = [(max(0, a), min(n, a + s)) for a, s, n in zip(corner, size, extent, strict=True)]
        if all(start < stop for start, stop in inside):
            place = [slice(start - a, stop - a) for (start, stop), a in zip(inside, corner, strict=True)]
            out[(slice(None), *place)] = source.read([(0, source.shape[0]), *inside])
        return out

    @property
    def blank(self) -> int:
        """The value of glass: white for colour images of bytes, zero for everything else."""
        return 255 if self.layout.channels == 3 and self.layout.dtype == np.uint8 else 0

    def tile(self, level: int, index: tuple[int, ...]) -> Pixels | None:
        """One decoded tile, from the cache if it is there; None where nothing was scanned."""
        reader = self._reader()
        if not reader.decoded:
            return reader.tile(level, index)
        if (known := self.colours.of(level, [range(i, i + 1) for i in index])) is not None:
            return self._plain(known, level)
        key = (self._token, level, index)
        pixels = tile_cache.get(key)
        if pixels is None:
            pixels = self._decode(reader, level, index)
            looked = self._plain((self.blank,) * self.layout.channels, level) if pixels is None else pixels
            if self.colours.note(level, index, self._inside(looked, level, index)) is None and pixels is not None:
                tile_cache.put(key, pixels)
        return pixels

    @property
    def colours(self) -> Colours:
        """Which of its tiles are of one colour, as far as they were decoded."""
        if self._colours is None:
            layout = self.layout
            with self._lock:
                self._colours = self._colours or Colours(layout)
        return self._colours

    def _inside(self, pixels: Pixels, level: int, index: tuple[int, ...]) -> Pixels:
        """What of a tile lies inside of the image."""
        here = self.levels[level]
        ends = [n - i * tile for n, i, tile in zip(here.size, index, here.tile, strict=True)]
        if all(end >= n for end, n in zip(ends, pixels.shape[1:], strict=True)):
            return pixels
        return pixels[(slice(None), *(slice(end) for end in ends))]

    def _plain(self, colour: Colour, level: int) -> Pixels:
        """A tile of one colour, which takes no memory."""
        pixels = np.array(colour, self.layout.dtype)
        size = self.levels[level].tile
        return np.broadcast_to(pixels.reshape(-1, *(1 for _ in size)), (len(colour), *size))

    def _decode(self, reader: Reader, level: int, index: tuple[int, ...]) -> Pixels | None:
        try:
            return reader.tile(level, index)
        except Exception as error:
            found = DamagedTile(self.name, level, index, str(error) or type(error).__name__)
        if self.on_damage == "raise":
            message = (
                "to read such tiles as glass: on_damage='white' (data.on_damage=white of outcore train, "
                "--on-damage white of outcore infer)"
            )
            raise DataError(f"{found}; {message}")
        with self._lock:
            if all((d.name, d.level, d.index) != (self.name, level, index) for d in self.damage):
                self.damage.append(found)
        return None

    def _reader(self) -> Reader:
        reader: Reader = handles.get(self._token, self._opened)
        return reader

    def __del__(self) -> None:
        handles.drop(self.__dict__.get("_token"))


@dataclass(frozen=True)
class SlideLevel:
    """One level of a slide, as a source."""

    slide: Slide
    level: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels and size."""
        return (self.slide.layout.channels, *self.slide.levels[self.level].size)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the pixels."""
        return self.slide.dtype

    def read(self, region: Region) -> Tensor:
        """One box, put together from the tiles it touches."""
        channels, *box = spans(region, self.shape)
        out = np.empty([b - a for a, b in (channels, *box)], self.slide.layout.dtype)
        for index in itertools.product(*self._touched(box)):
            self._paste(out, self.slide.tile(self.level, index), index, channels, box)
        return torch.from_numpy(out)

    def colour(self, region: Region) -> Colour | None:
        """The one colour of a box, where that is known without reading it; none where it is not."""
        channels, *box = spans(region, self.shape)
        found = self.slide.colours.of(self.level, self._touched(box))
        return None if found is None else found[slice(*channels)]

    def _touched(self, box: Sequence[Span]) -> list[range]:
        tiles = self.slide.levels[self.level].tile
        return [range(a // tile, -(-b // tile)) for (a, b), tile in zip(box, tiles, strict=True)]

    def _paste(
        self, out: Pixels, tile: Pixels | None, index: tuple[int, ...], channels: Span, box: Sequence[Span]
    ) -> None:
        sizes = self.slide.levels[self.level].tile
        into: list[slice] = []
        taken: list[slice] = []
        for i, size, (start, stop) in zip(index, sizes, box, strict=True):
            low, high = max(start, i * size), min(stop, (i + 1) * size)
            into.append(slice(low - start, high - start))
            taken.append(slice(low - i * size, high - i * size))
        out[(slice(None), *into)] = self.slide.blank if tile is None else tile[(slice(*channels), *taken)]


Colour = tuple[int | float, ...]
"""One number for each channel."""

_MIXED = -1
_MOST = 32_000
"""The number of colours that are distinguished; tiles of further ones count as mixed."""


class Colours:
    """The colours of a file's tiles.

    >>> from outcore.data.reader import PyramidLevel
    >>> colours = Colours(FileLayout((PyramidLevel((8, 8), (4, 4)),), 1, np.dtype(np.uint8)))
    >>> for place in ((0, 0), (0, 1)):
    ...     _ = colours.note(0, place, np.full((1, 4, 4), 7, np.uint8))
    >>> colours.of(0, [range(1), range(2)]), colours.of(0, [range(2), range(2)])
    ((7,), None)
    """

    def __init__(self, layout: FileLayout) -> None:
        self._numbers = [np.zeros(level.grid, np.int16) for level in layout.levels]
        """For each tile the number of its colour; 0 where it was not decoded."""
        self._known: list[Colour] = []
        self._by_colour: dict[Colour, int] = {}
        self._last: tuple[Pixels | None, Colour | None] = None, None
        """A reader may give the same array again."""
        self._lock = threading.Lock()

    def note(self, level: int, index: tuple[int, ...], pixels: Pixels) -> Colour | None:
        """Note the colour of a tile; returns it, or None if it has several."""
        before, colour = self._last
        if pixels is before and colour is not None:
            self._numbers[level][index] = self._number(colour)
            return colour
        flat = pixels.reshape(pixels.shape[0], -1)
        first = flat[:, 0]
        # Channel by channel: the comparison takes memory, too.
        alike = ((plane == n).all() for plane, n in zip(flat, first, strict=True))
        if not np.array_equal(first, flat[:, -1]) or not all(alike):
            self._numbers[level][index] = _MIXED
            return None
        colour = tuple(first.tolist())
        self._last = pixels, colour
        self._numbers[level][index] = self._number(colour)
        return colour

    def of(self, level: int, places: Sequence[range]) -> Colour | None:
        """The one colour of a box of tiles; None if there are several, or one of the tiles was not decoded."""
        numbers = self._numbers[level][tuple(slice(p.start, p.stop) for p in places)]
        first = int(numbers.flat[0]) if numbers.size else 0
        return self._known[first - 1] if first > 0 and bool((numbers == first).all()) else None

    def _number(self, colour: Colour) -> int:
        with self._lock:
            if colour not in self._by_colour and len(self._known) < _MOST:
                self._known.append(colour)
                self._by_colour[colour] = len(self._known)
            return self._by_colour.get(colour, _MIXED)
