"""A data set from a table: one row for each slide, with its label and, for segmentation, its mask.

    path,label,mask
    slides/001.tif,benign,masks/001.tif
    slides/002.svs,malignant,masks/002.tif

Paths are relative to the table. Labels that are whole numbers are class numbers, other words are classes in
alphabetical order, and numbers with a point are values to regress. Everything that can be wrong with a table is
found when it is read and named with its row; a slide that turns out to be unreadable later stops the run or, when
asked, is skipped and listed in `SlideTable.bad`.

A folder of images is a data set too, with one folder for each class:

hymenoptera/train/ants/0013035.jpg
hymenoptera/train/bees/16838648_415acd9e3f.jpg
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outcore.data.opening import SLIDE_ENDINGS, open_slide
from outcore.data.slide import DamagedTile, OnDamage, Slide
from outcore.data.table_file import listed, read_rows
from outcore.errors import DataError, MissingPackageError

OnBad = Literal["raise", "skip"]
_MOST_CLASSES = 1_000_000


@dataclass(frozen=True)
class SlideRow:
    """One row of a table."""

    number: int
    """The line in the file, the header being line 1."""
    path: Path
    label: int | float | None = None
    mask: Path | None = None


@dataclass(frozen=True)
class Example:
    """An opened slide with its target."""

    row: SlideRow
    image: Slide
    mask: Slide | None = None

    @property
    def label(self) -> int | float | None:
        """The class number or value."""
        return self.row.label


@dataclass(frozen=True)
class BadSlide:
    """A slide that was skipped, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return self.reason if str(self.path) in self.reason else f"{self.path}: {self.reason}"


@dataclass
class SlideTable:
    """The rows of a table, opened one by one.

    Attributes:
        classes: the words of the labels, by class number; empty where labels are numbers.
        bad: what was skipped so far, each slide once.
        damage: tiles that were read as glass so far, each once.
    """

    rows: tuple[SlideRow, ...]
    classes: tuple[str, ...] = ()
    on_bad: OnBad = "raise"
    on_damage: OnDamage = "raise"
    name: str = "table"
    bad: list[BadSlide] = field(default_factory=list)
    damage: list[DamagedTile] = field(default_factory=list)
    _slides: dict[Path, Slide] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        row = self.rows[index]
        try:
            image = self._opened(row.path)
            mask = None if row.mask is None else self._opened(row.mask)
        except MissingPackageError:
            raise
        except DataError as error:
            raise DataError(f"{self.name}, line {row.number}: {error}") from error
        if mask is not None and mask.levels[0].size != image.levels[0].size:
            sizes = f"{mask.levels[0].size} pixels, its slide {image.levels[0].size}"
            raise DataError(f"{self.name}, line {row.number}: the mask {row.mask} has {sizes}; they must be the same")
        return Example(row, image, mask)

    def _opened(self, path: Path) -> Slide:
        """The slide of a path, kept open: what is known of its glass is not found out again in every epoch."""
        if path not in self._slides:
            slide = open_slide(path, on_damage=self.on_damage)
            slide.damage = self.damage
            self._slides[path] = slide
        return self._slides[path]

    def examples(self, order: Sequence[int] | None = None) -> Iterator[Example]:
        """The examples in an order; bad ones raise or are skipped, as configured."""
        for index in range(len(self)) if order is None else order:
            try:
                yield self[index]
            except DataError as error:
                self.skip(index, str(error), error)

    def skip(self, index: int, reason: str, cause: Exception | None = None) -> None:
        """Note a slide as bad; raises unless such slides are to be skipped, or if a package is missing."""
        if isinstance(cause, MissingPackageError):
            raise cause
        if self.on_bad == "raise":
            raise DataError(f"{reason}; to go on without such slides: data.on_bad=skip") from cause
        path = self.rows[index].path
        if all(known.path != path for known in self.bad):
            self.bad.append(BadSlide(path, reason))


def read_table(
    path: str | Path,
    *,
    classes: Sequence[str] = (),
    on_bad: OnBad = "raise",
    on_damage: OnDamage = "raise",
) -> SlideTable:
    """Read a table of slides.

    Args:
        path: a CSV file with a column ``path``, and ``label`` or ``mask`` or both.
        classes: the words that labels may be, in the order of their numbers; found from the table when not given.
        on_bad: whether a slide that cannot be opened stops the run or is skipped and listed.
        on_damage: whether a damaged tile stops the run or is read as glass and counted.
    """
    _check_choices(on_bad, on_damage)
    path = Path(path)
    columns, lines = read_rows(path)
    if "path" not in columns or not {"label", "mask"} & set(columns):
        raise DataError(f"{path} has columns {listed(columns)}; needed are path, and label or mask")
    if not lines:
        raise DataError(f"{path} names no slide; below its columns write a line for each, like slides/001.tif,benign")
    labels, names = _labels(path, [(n, line.get("label")) for n, line in lines], "label" in columns, classes)
    rows = []
    for (number, line), label in zip(lines, labels, strict=True):
        mask = (line.get("mask") or "").strip()
        slide = path.parent / line["path"].strip()
        masked = path.parent / mask if mask else None
        for file_path in filter(None, (slide, masked)):
            if on_bad == "raise" and not _exists(file_path):
                raise DataError(f"{path}, line {number}: no file {file_path}; paths are relative to the table's folder")
        rows.append(SlideRow(number, slide, label, masked))
    _check_repeated(path, rows, names)
    return SlideTable(tuple(rows), names, on_bad, on_damage, str(path))


def _check_repeated(path: Path, rows: Sequence[SlideRow], names: Sequence[str]) -> None:
    """Refuse a slide that is of one class in one line and of another in the next; alike, it just counts twice."""
    first: dict[Path, SlideRow] = {}
    for row in rows:
        before = first.setdefault(row.path, row)
        if isinstance(row.label, int) and row.label != before.label:
            here, there = (names[n] if names else n for n in (row.label, int(before.label or 0)))
            raise DataError(
                f"{path}, line {row.number}: {row.path} has the label {here!r}, and {there!r} in line {before.number}; "
                "correct one of them"
            )


def _labels(
    path: Path, cells: Sequence[tuple[int, str | None]], wanted: bool, classes: Sequence[str]
) -> tuple[list[int | float | None], tuple[str, ...]]:
    """The labels as numbers, and the words they stand for."""
    if not wanted:
        return [None] * len(cells), ()
    words = [(number, (cell or "").strip()) for number, cell in cells]
    for number, word in words:
        if not word:
            raise DataError(f"{path}, line {number}: the label is empty")
    if classes:
        known = {name: i for i, name in enumerate(classes)}
        for number, word in words:
            if word not in known:
                raise DataError(f"{path}, line {number}: label {word!r} is none of {', '.join(classes)}")
        return [known[word] for _, word in words], tuple(classes)
    numbers = [_number(word) for _, word in words]
    if all(isinstance(n, int) for n in numbers):
        for (number, word), value in zip(words, numbers, strict=True):
            if value is not None and not 0 <= value < _MOST_CLASSES:
                what = "negative" if value < 0 else f"above {_MOST_CLASSES:,}"
                raise DataError(f"{path}, line {number}: label {word} is {what}; classes count from 0")
        return list(numbers), ()
    if all(n is not None for n in numbers):
        for (number, word), value in zip(words, numbers, strict=True):
            if value is not None and not math.isfinite(value):
                raise DataError(f"{path}, line {number}: label {word} is not a finite number")
        return [float(n) for n in numbers if n is not None], ()
    strays = [(n, word) for (n, word), value in zip(words, numbers, strict=True) if value is not None]
    if strays:
        raise DataError(f"{path}, line {strays[0][0]}: label {strays[0][1]!r} is a number, others are words")
    names = tuple(sorted({word for _, word in words}))
    known = {name: i for i, name in enumerate(names)}
    return [known[word] for _, word in words], names


def _check_choices(on_bad: str, on_damage: str) -> None:
    """Refuse a word that is none of the choices: otherwise slides would be skipped because of it."""
    if on_bad not in ("raise", "skip"):
        raise DataError(f"on_bad={on_bad!r} is not known; say 'raise' or 'skip'")
    if on_damage not in ("raise", "white"):
        raise DataError(f"on_damage={on_damage!r} is not known; say 'raise' or 'white'")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, or holds a zero byte
        return False


def _number(word: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return None


def read_folder(
    path: str | Path,
    *,
    classes: Sequence[str] = (),
    on_bad: OnBad = "raise",
    on_damage: OnDamage = "raise",
) -> SlideTable:
    """The images of a folder, labelled by the folder they lie in.

    Args:
        path: the folder with one folder for each class.
        classes: their names in the order of their numbers; alphabetical when not given.
        on_bad: as for `read_table`.
        on_damage: as for `read_table`.
    """
    _check_choices(on_bad, on_damage)
    path = Path(path)
    folders = sorted(p for p in path.iterdir() if p.is_dir() and p.suffix != ".zarr") if path.is_dir() else []
    if not folders:
        raise DataError(f"{path} has no folders; one for each class is needed, like {path}/ants and {path}/bees")
    names = tuple(classes) or tuple(p.name for p in folders)
    unknown = [p.name for p in folders if p.name not in names]
    if unknown:
        raise DataError(f"{path} has a folder {unknown[0]}, which is none of the classes {', '.join(names)}")
    files = [(file, names.index(p.name)) for p in folders for file in sorted(p.iterdir())]
    rows = [
        SlideRow(n, file, label) for n, (file, label) in enumerate(files, 1) if file.suffix.lower() in SLIDE_ENDINGS
    ]
    if not rows:
        raise DataError(f"{path} has folders but no images in them; images end in {', '.join(sorted(SLIDE_ENDINGS))}")
    return SlideTable(tuple(rows), names, on_bad, on_damage, str(path))
