"""A data set from a folder of images: one folder for each class.

hymenoptera/train/ants/0013035.jpg
hymenoptera/train/bees/16838648_415acd9e3f.jpg
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outcore.data.opening import SLIDE_ENDINGS
from outcore.data.slide import OnDamage
from outcore.data.table import OnBad, SlideRow, SlideTable
from outcore.errors import DataError

__all__ = ["read_folder"]


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
