"""The training examples, one at a time: slides of a table, a data set of the user's, or made-up batches.

Whatever is random about an example (where a crop lies) is a function of the seed, the epoch and the example's number,
never of what was drawn before it, so that a run can continue in the middle of an epoch with the same examples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from outcore.data import Batch, Slide, SlideTable, Source, read_folder, read_table
from outcore.data.source import Region, spans
from outcore.errors import ConfigError, DataError
from outcore.train.settings.config import DataConfig

__all__ = [
    "CroppedSource",
    "Examples",
    "OwnExamples",
    "SlideExamples",
    "at_scale",
    "find_tables",
    "generator",
    "resized",
]


_KINDS: dict[type, str] = {int: "whole numbers", float: "numbers with a point", type(None): "masks"}


class Examples(Protocol):
    """Numbered examples."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The name of an example in messages."""

    def pixels(self, index: int) -> int:
        """How large an input is, without reading it; 0 where all are alike or nobody knows."""

    def load(self, index: int, epoch: int, *, training: bool) -> tuple[Any, Any]:
        """One input and its target; the input may be a source."""

    def skip(self, index: int, error: DataError) -> None:
        """Note an example as bad, or raise."""


@dataclass(frozen=True)
class CroppedSource:
    """A window of a source."""

    source: Source
    box: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels and the size of the window."""
        return (self.source.shape[0], *(b - a for a, b in self.box))

    @property
    def dtype(self) -> torch.dtype:
        """That of the source."""
        return self.source.dtype

    def read(self, region: Region) -> Tensor:
        """A box of the window."""
        channels, *inside = spans(region, self.shape)
        return self.source.read([channels, *self._moved(inside)])

    def colour(self, region: Region) -> Any:
        """What the source knows of a box."""
        channels, *inside = spans(region, self.shape)
        known = getattr(self.source, "colour", None)
        return None if known is None else known([channels, *self._moved(inside)])

    def _moved(self, inside: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(a + start, b + start) for (a, b), (start, _) in zip(inside, self.box, strict=True)]


@dataclass(frozen=True)
class SlideExamples:
    """Slides of a table, as the settings want them."""

    table: SlideTable
    config: DataConfig
    seed: int = 0
    rows: tuple[int, ...] | None = None
    """Which rows of the table; all when not given."""

    def __len__(self) -> int:
        return len(self.table) if self.rows is None else len(self.rows)

    def name(self, index: int) -> str:
        """Its path."""
        return str(self.table.rows[self._row(index)].path)

    def pixels(self, index: int) -> int:
        """Numbers of the image, by its file's header; 0 where every image is cut or brought to one size."""
        if self.config.crop is not None or self.config.resize is not None:
            return 0
        try:
            return math.prod(at_scale(self.table[self._row(index)].image, self.config).shape)
        except DataError as error:
            self.skip(index, error)
            return 0

    def skip(self, index: int, error: DataError) -> None:
        """Note a slide as bad, or raise, as the table was configured."""
        self.table.skip(self._row(index), str(error), error)

    def load(self, index: int, epoch: int, *, training: bool) -> tuple[Any, Any]:
        """The image, and its label or mask."""
        row = self._row(index)
        example = self.table[row]
        image: Any = at_scale(example.image, self.config)
        mask: Any = None if example.mask is None else at_scale(example.mask, self.config)
        if self.config.crop is not None:
            box = self._window(image.shape[1:], row, epoch if training else None)
            image, mask = CroppedSource(image, box), None if mask is None else CroppedSource(mask, box)
        if self.config.resize is not None:
            image = resized(image, self.config.resize)
        if mask is not None:
            return image, mask.read([(0, n) for n in mask.shape])[0].long()
        if example.label is None:
            raise DataError(f"{self.name(index)} has neither a label nor a mask")
        return image, torch.tensor(example.label, device="cpu")

    def _row(self, index: int) -> int:
        return index if self.rows is None else self.rows[index]

    def _window(self, size: Sequence[int], row: int, epoch: int | None) -> tuple[tuple[int, int], ...]:
        """A window somewhere, or in the middle for validation."""
        side = self.config.crop
        assert side is not None
        if min(size) < side:
            shown = "x".join(map(str, size))
            raise DataError(f"{self.table.rows[row].path} has {shown} pixels; a crop of {side} does not fit into it")
        if epoch is None:
            starts = [(n - side) // 2 for n in size]
        else:
            random = generator(self.seed, epoch, row)
            starts = [int(torch.randint(n - side + 1, (), generator=random, device="cpu")) for n in size]
        return tuple((start, start + side) for start in starts)


@dataclass(frozen=True)
class OwnExamples:
    """A data set of the user's: anything with a length that gives an input and a target for a number."""

    dataset: Any
    label: str = "dataset"

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, index: int) -> str:
        """Its number."""
        return f"{self.label}[{index}]"

    def pixels(self, index: int) -> int:
        """Unknown: a data set of the user's says it only when it is read."""
        return 0

    def skip(self, index: int, error: DataError) -> None:
        """Bad examples of a user's own stop the run."""
        raise error

    def load(self, index: int, epoch: int, *, training: bool) -> tuple[Any, Any]:
        """What the data set gives."""
        made = self.dataset[index]
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise DataError(f"{self.name(index)} is a {type(made).__name__}; it must be an input and a target")
        inputs, target = made
        return inputs, target if isinstance(target, Tensor) else torch.as_tensor(target, device="cpu")


def find_tables(config: DataConfig, seed: int) -> tuple[SlideExamples, SlideExamples | None]:
    """Training and validation examples, as the settings name them."""
    assert config.train is not None
    train = _table(config.train, config)
    if isinstance(config.validation, str):
        # By the classes of what is trained on: a validation that lacks one of them would count the others anew.
        validation = _table(config.validation, config, train.classes)
        _check_kinds(train, validation)
        return SlideExamples(train, config, seed), SlideExamples(validation, config, seed)
    if config.validation is None:
        return SlideExamples(train, config, seed), None
    order = torch.randperm(len(train), generator=generator(seed, 0, -1), device="cpu").tolist()
    aside = max(1, round(len(train) * config.validation))
    if aside >= len(train):
        raise ConfigError(f"data.validation={config.validation} leaves nothing of {len(train)} examples to train on")
    order = _by_class(order, [row.label if isinstance(row.label, int) else None for row in train.rows])
    shown = {train.rows[i].path for i in order[:aside]}  # a slide of several rows is on one side with all of them
    held = tuple(i for i, row in enumerate(train.rows) if row.path in shown)
    kept = tuple(i for i, row in enumerate(train.rows) if row.path not in shown)
    if not kept:
        raise ConfigError(f"data.validation={config.validation} leaves nothing of {config.train} to train on")
    return SlideExamples(train, config, seed, kept), SlideExamples(train, config, seed, held)


def _by_class(order: list[int], labels: list[int | None]) -> list[int]:
    """An order whose every beginning has about the same share of each class; of one class, the order that is given.

    >>> _by_class([0, 1, 2, 3, 4, 5], [7, 7, 7, 7, 8, 8])
    [0, 4, 1, 2, 5, 3]
    """
    sizes, seen, place = Counter(labels), Counter[int | None](), dict[int, float]()
    for index in order:
        place[index] = (seen[labels[index]] + 0.5) / sizes[labels[index]]
        seen[labels[index]] += 1
    return sorted(order, key=place.__getitem__)


def generator(*numbers: int) -> torch.Generator:
    """A generator of its own for each tuple of numbers."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        mixed = (mixed ^ (number & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed ^= mixed >> 29
    return torch.Generator().manual_seed(mixed % 2**63)


def _check_kinds(train: SlideTable, validation: SlideTable) -> None:
    """Refuse a validation whose labels are of another kind: words of which training knows only numbers, say."""
    said = []
    for table in (train, validation):
        label = table.rows[0].label
        said.append("words" if table.classes else _KINDS[type(label)])
    if said[0] != said[1]:
        raise DataError(f"labels of {train.name} are {said[0]}, those of {validation.name} {said[1]}; write them alike")


def _table(name: str, config: DataConfig, classes: tuple[str, ...] = ()) -> SlideTable:
    read = read_folder if Path(name).is_dir() else read_table
    return read(name, classes=config.classes or classes, on_bad=config.on_bad, on_damage=config.on_damage)


def at_scale(slide: Slide, config: DataConfig) -> Source:
    """A slide at the resolution that was asked for, or else at the level."""
    if config.microns_per_pixel is not None:
        return slide.at(microns_per_pixel=config.microns_per_pixel)
    return slide.at(level=config.level)


def resized(image: Source, side: int) -> Tensor:
    """A whole image brought to a square, in memory."""
    whole = Batch((image,)).tensor()
    modes = {4: "bilinear", 5: "trilinear"}
    size = [side] * (whole.ndim - 2)
    made: Tensor = F.interpolate(whole, size, mode=modes[whole.ndim], antialias=whole.ndim == 4, align_corners=False)
    return made[0]
