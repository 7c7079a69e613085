"""Reading checkpoints: the newest good one, whoever wrote it.

Candidates are tried from the newest on. The files of one are shared out among the ranks, each verifies size and
checksum of its own, and only if all agree is it used; a torn one is passed over with a warning. Then each rank reads,
tensor by tensor, what its stages need.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outcore.errors import CheckpointError
from outcore.run.checkpoint import DOCUMENT, FORMAT, INDEX, LATEST, checksum
from outcore.run.world import World

__all__ = ["Stored", "find_checkpoint", "read_weights"]


class Stored:
    """A verified checkpoint, read tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.document: dict[str, Any] = json.loads((path / DOCUMENT).read_text(encoding="utf-8"))
        self.weights: dict[str, str] = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
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

    def load_weights(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy stored weights into tensors of the same names."""
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


def find_checkpoint(world: World, path: str | Path) -> Stored:
    """The checkpoint at a path, or the newest good one under it; collective."""
    root = Path(path)
    tried = []
    for candidate in world.share([str(c) for c in _candidates(root)])[0]:
        trouble = next((t for t in world.share(_verify(world, Path(candidate))) if t), None)
        if trouble is None:
            return Stored(Path(candidate))
        tried.append(trouble)
        if world.rank == 0:
            warnings.warn(f"checkpoint passed over: {trouble}", stacklevel=2)
    reasons = f" ({'; '.join(tried)})" if tried else ""
    raise CheckpointError(f"no good checkpoint in {root}{reasons}; give the directory that `save` was given")


def _candidates(root: Path) -> list[Path]:
    if (root / DOCUMENT).is_file():
        return [root]
    found = sorted(root.glob("step-*"), reverse=True)
    if (root / LATEST).is_file():
        latest = root / (root / LATEST).read_text().strip()
        found = [latest, *(p for p in found if p != latest)]
    return found


def _verify(world: World, path: Path) -> str | None:
    """Check this rank's share of the files; what is wrong, if something is."""
    try:
        document = json.loads((path / DOCUMENT).read_text(encoding="utf-8"))
        if document.get("format") != FORMAT:
            return f"{path} has format {document.get('format')!r}; this outcore reads {FORMAT}"
        json.loads((path / INDEX).read_text(encoding="utf-8"))
        for file, (size, digest) in sorted(document["files"].items())[world.rank :: world.size]:
            found = (path / file).stat().st_size
            if found != size:
                return f"{path / file} has {found:,} bytes, {size:,} were written"
            if checksum(path / file) != digest:
                return f"{path / file} is not what was written (its checksum differs)"
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        return f"{path}: {type(error).__name__}: {error}"
    return None


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint, for `model.load_state_dict`.

    >>> read_weights("/nowhere")
    Traceback (most recent call last):
    outcore.errors.CheckpointError: no good checkpoint in /nowhere; give the directory that `save` was given
    """
    stored = find_checkpoint(World(0, 1, 0, None, None, owned=False), path)
    return dict(stored.read(stored.weights, stored.weights))
