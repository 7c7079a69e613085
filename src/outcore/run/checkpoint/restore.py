"""Reading checkpoints: the newest good one, whoever wrote it.

Candidates are tried from the newest on. Their documents are checked first: against their checksums, then against what
a checkpoint says (`outcore.documents.schema`), and every file they name must lie beside them. The files are then
shared out among the ranks, each verifies size and checksum of its own, and only if all agree is the candidate
used; a torn one, and one whose documents cannot be understood, is passed over with a warning. Then each rank reads,
tensor by tensor, what its stages need.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outcore.documents.reading import read_json, read_text
from outcore.documents.schema import Anything, ListOf, MapOf, Maybe, Number, OneOf, Record, Schema, Text, Whole
from outcore.errors import CheckpointError
from outcore.run.checkpoint.files import (
    DOCUMENT,
    FORMAT,
    INDEX,
    SUMS,
    checksum,
    complete_ones,
    latest_name,
    replaced_ones,
)
from outcore.run.ranks.world import World

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")


class _FileName(Schema):
    """The name of a file beside the document that names it."""

    expected = "the name of a .safetensors file in the same folder"

    def problem(self, value: Any, place: str) -> tuple[str, str, str] | None:
        """What is wrong with a value, if something is."""
        return None if isinstance(value, str) and _FILE.fullmatch(value) else self._wrong(value, place)


_INDEX = Record({"weight_map": MapOf(_FileName())}, {"metadata": Anything()})
_DOCUMENT = Record(
    {
        "format": OneOf((1, FORMAT)),
        "step": Whole(least=0),
        "files": MapOf(ListOf(Anything(), 2, 2)),
        "state_map": MapOf(_FileName()),
        "ranks": Whole(least=1),
        "seed": Whole(),
        "samples": Whole(least=0),
        "skipped": Whole(least=0),
        "groups": ListOf(MapOf()),
        "scalars": MapOf(MapOf()),
        "scheduler": Maybe(MapOf()),
        "scale": Maybe(ListOf(Number(), 2, 2)),
        "loader": Maybe(MapOf()),
        "extra": Anything(),
    },
    {"plan": Maybe(MapOf()), "network": Maybe(Text())},
)


class StoredCheckpoint:
    """A verified checkpoint, read tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.document: dict[str, Any] = read_json(path / DOCUMENT, _DOCUMENT, CheckpointError)
        self.weights: dict[str, str] = read_json(path / INDEX, _INDEX, CheckpointError)["weight_map"]
        self.state: dict[str, str] = self.document["state_map"]

    def read(self, names: Iterable[str], where: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors, file by file."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(where[name], []).append(name)
        for file, inside in by_file.items():
            with safe_open(self.path / file, framework="pt") as opened:
                for name in inside:
                    yield name, opened.get_tensor(name)

    def load_weights(self, targets: Mapping[str, torch.Tensor], model: Iterable[str] = ()) -> None:
        """Copy stored weights into tensors of the same names.

        Args:
            targets: the tensors that this rank holds.
            model: all names of the model, on any rank; what is stored beyond them is another model's.
        """
        if (known := set(model)) and (extra := self.weights.keys() - known):
            raise CheckpointError(
                f"{self.path} has {min(extra)}, which the model has not ({len(extra)} weights are too many): it is of "
                "another model"
            )
        if missing := [name for name in targets if name not in self.weights]:
            raise CheckpointError(
                f"{self.path} has no {missing[0]} ({len(missing)} of {len(targets)} weights are missing): it is of "
                "another model"
            )
        with torch.no_grad():
            for name, tensor in self.read(targets, self.weights):
                if tensor.shape != targets[name].shape:
                    raise CheckpointError(
                        f"{name} has shape {list(tensor.shape)} in {self.path}, and {list(targets[name].shape)} "
                        "here: it is of another model"
                    )
                targets[name].copy_(tensor)


def find_checkpoint(world: World, path: str | Path) -> StoredCheckpoint:
    """The checkpoint at a path, or the newest good one under it; collective."""
    root = Path(path)
    tried = []
    for candidate in world.share([str(c) for c in _candidates(root)])[0]:
        trouble = next((t for t in world.share(_verify(world, Path(candidate))) if t), None)
        if trouble is None:
            return StoredCheckpoint(Path(candidate))
        tried.append(trouble)
        if world.rank == 0:
            warnings.warn(f"checkpoint passed over: {trouble}", stacklevel=2)
    reasons = f" ({'; '.join(tried)})" if tried else ""
    raise CheckpointError(f"no good checkpoint in {root}{reasons}; give the directory that `save` was given")


def has_checkpoint(path: Path) -> bool:
    """Whether there is a finished checkpoint at a path or under it, good or not."""
    return (path / DOCUMENT).exists() or bool(_candidates(path))


def _candidates(root: Path) -> list[Path]:
    if (root / DOCUMENT).is_file():
        return [root]
    found = complete_ones(root)
    if (name := latest_name(root)) is not None and (root / name).is_dir():
        found = [root / name, *(p for p in found if p.name != name)]
    return found + replaced_ones(root)


def _verify(world: World, path: Path) -> str | None:
    """Check the documents, and this rank's share of the files; returns what is wrong, if something is."""
    try:
        sums = _sums(path)
        stored = StoredCheckpoint(path)
        files = stored.document["files"]
        if sums and sums.keys() != {*files, INDEX, DOCUMENT}:
            return f"{path / SUMS} lists other files than {DOCUMENT}"
        if missing := {*stored.weights.values(), *stored.state.values()} - files.keys():
            return f"{path / DOCUMENT}: files does not list {min(missing)}, which holds tensors"
        for file, row in sorted(files.items())[world.rank :: world.size]:
            size, digest = row
            if (problem := _FileName().problem(file, "files")) is not None:
                return f"{path / DOCUMENT}: files names {file!r}; expected {problem[2]}"
            found = (path / file).stat().st_size
            if found != size:
                return f"{path / file} has {found:,} bytes, {size:,} were written"
            if checksum(path / file) != digest or (sums and sums[file] != digest):
                return f"{path / file} is not what was written (its checksum differs)"
    except CheckpointError as error:
        return str(error)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        return f"{path}: {type(error).__name__}: {error}"
    return None


def _sums(path: Path) -> dict[str, str]:
    """The checksums of a checkpoint's files, those of its documents compared; none where format 1 has none."""
    if not (path / SUMS).exists():
        if read_json(path / DOCUMENT, Record({"format": Anything()}, open=True), CheckpointError)["format"] == 1:
            return {}
        raise CheckpointError(f"{path} has no {SUMS}; it is not complete")
    rows = [line.partition("  ") for line in read_text(path / SUMS, CheckpointError, "checksums").splitlines()]
    sums = {file: digest for digest, _, file in rows}
    for file in (INDEX, DOCUMENT):
        if checksum(path / file) != sums.get(file):
            raise CheckpointError(f"{path / file} is not what was written (its checksum differs)")
    return sums


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint, for `model.load_state_dict`.

    >>> read_weights("/nowhere")
    Traceback (most recent call last):
    outcore.errors.CheckpointError: no good checkpoint in /nowhere; give the directory that `save` was given
    """
    stored = find_checkpoint(World(0, 1, 0, None, None, owned=False), path)
    return dict(stored.read(stored.weights, stored.weights))
