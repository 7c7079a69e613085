"""Checkpoints: sharded safetensors with a JSON index, written aside and renamed, never pickled.

    checkpoints/
      step-0000000012/
        weights-00001-of-00004.safetensors    one file per stage, the model's own names
        state-00001-of-00004.safetensors      one file per rank: optimizer state, generators
        model.safetensors.index.json          which weight is in which file, as Hugging Face writes it
        checkpoint.json                       step, plan, groups, scheduler, loss scale
        SHA256SUMS                            checksums of all of these, as `sha256sum -c` reads them
      latest                                  the name of the last good one

Every rank writes what it holds (a stage that several hold is written by the first) into a directory beside the final
one. The ranks then exchange checksums; only if all succeeded does rank 0 write the index and rename the directory.
Until that moment the checkpoint before it is the latest, and it is not removed before. Removed are only directories
whose names are ours to the last character, never the one that `latest` names. A checkpoint of the same step that is
there already is moved aside for the moment of the rename (``.step-….replaced``), where a reader still finds it. What a
killed run left of a checkpoint that it was writing is removed by the next one. Whatever is saved is named after
parameters, not ranks, so any number of ranks can read it under any plan. Weights alone load in plain PyTorch:

    for file in set(json.load(open("model.safetensors.index.json"))["weight_map"].values()):
        model.load_state_dict(safetensors.torch.load_file(file), strict=False)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outcore.errors import CheckpointError
from outcore.run.ranks.world import World

FORMAT = 2
"""Of `checkpoint.json`; format 1 had no checksums of the documents themselves, and is still read."""
INDEX = "model.safetensors.index.json"
DOCUMENT = "checkpoint.json"
SUMS = "SHA256SUMS"
LATEST = "latest"
_NAME = re.compile(r"step-\d{10,}")
_LEFTOVER = re.compile(r"\.step-\d{10,}\.(partial|replaced)|\.latest")

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class RankFiles:
    """What one rank writes: tensors by the name of the file they go to."""

    weights: Mapping[str, Tensors]
    state: Mapping[str, Tensors]

    def snapshot(self) -> RankFiles:
        """The same as copies on the host, so that training can go on."""

        def copied(files: Mapping[str, Tensors]) -> dict[str, Tensors]:
            return {file: {n: t.detach().to("cpu", copy=True) for n, t in rows.items()} for file, rows in files.items()}

        return RankFiles(copied(self.weights), copied(self.state))


@dataclass
class CheckpointWriter:
    """A checkpoint that is being written by this rank."""

    root: Path
    step: int
    document: dict[str, Any]
    keep: int
    rows: dict[str, list[Any]] = field(default_factory=dict)
    """File -> size and checksum."""
    names: dict[str, dict[str, str]] = field(default_factory=lambda: {"weights": {}, "state": {}})
    """Tensor -> the file it is in."""
    error: str | None = None
    thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """The directory of the finished checkpoint."""
        return f"step-{self.step:010d}"

    @property
    def aside(self) -> Path:
        """The directory it is written to until it is complete."""
        return self.root / f".{self.name}.partial"

    @property
    def done(self) -> bool:
        """Whether this rank has written all it has to."""
        return self.thread is None or not self.thread.is_alive()


def write(
    world: World, root: Path, step: int, files: RankFiles, document: dict[str, Any], *, keep: int, wait: bool
) -> CheckpointWriter:
    """Begin to write a checkpoint; collective. `commit` ends it."""
    writing = CheckpointWriter(root, step, document, keep)
    trouble = None
    if world.rank == 0:
        try:
            root.mkdir(parents=True, exist_ok=True)
            remove_leftovers(root)
            writing.aside.mkdir()
        except OSError as error:
            trouble = f"{writing.aside} cannot be made: {error.strerror}"
    if shared := next((t for t in world.share(trouble) if t), None):
        raise CheckpointError(f"{shared}; give a directory that can be written")
    if wait:
        _write_files(writing, files)
    else:
        copies = files.snapshot()
        writing.thread = threading.Thread(target=_write_files, args=(writing, copies), daemon=True, name="checkpoint")
        writing.thread.start()
    return writing


def _write_files(writing: CheckpointWriter, files: RankFiles) -> None:
    try:
        for kind, rows in (("weights", files.weights), ("state", files.state)):
            for file, tensors in rows.items():
                path = writing.aside / file
                save_file(_apart(tensors), path)
                _sync(path)
                writing.rows[file] = [path.stat().st_size, checksum(path)]
                writing.names[kind].update(dict.fromkeys(tensors, file))
    except Exception as error:  # full disk, lost mount: reported to all ranks by `commit`
        writing.error = str(error).strip().splitlines()[0]


def _apart(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors on the host, a copy of what shares memory with another: what is tied is stored under all its names.

    Who reads one of the names may hold it apart from the others, as another stage.
    """
    made, seen = {}, set()
    for name, tensor in tensors.items():
        here = tensor.detach().cpu().contiguous()
        memory = here.untyped_storage().data_ptr()
        made[name] = here.clone() if memory in seen and here.numel() else here
        seen.add(memory)
    return made


def commit(world: World, writing: CheckpointWriter) -> Path:
    """Make a checkpoint valid when all ranks have written their part; collective."""
    if writing.thread is not None:
        writing.thread.join()
    mine = {"rows": writing.rows, "names": writing.names, "error": writing.error}
    shared = world.share(mine)
    failed = [f"rank {rank}: {row['error']}" for rank, row in enumerate(shared) if row["error"]]
    trouble = None
    if world.rank == 0 and not failed:
        try:
            _finish(writing, shared)
        except OSError as error:
            trouble = f"rank 0: {error}"
    failed += [t for t in world.share(trouble) if t]
    if failed:
        if world.rank == 0:
            shutil.rmtree(writing.aside, ignore_errors=True)
        kept = f"; {kept_one} is still good" if (kept_one := latest_name(writing.root)) else ""
        raise CheckpointError(f"checkpoint {writing.name} was not written ({'; '.join(failed)}){kept}")
    return writing.root / writing.name


def _finish(writing: CheckpointWriter, shared: list[dict[str, Any]]) -> None:
    rows = {file: row for one in shared for file, row in one["rows"].items()}
    names: dict[str, dict[str, str]] = {"weights": {}, "state": {}}
    for one in shared:
        for kind, found in names.items():
            found.update(one["names"][kind])
    total = sum(size for file, (size, _) in rows.items() if file.startswith("weights"))
    index = {"metadata": {"total_size": total}, "weight_map": names["weights"]}
    _put(writing.aside / INDEX, json.dumps(index, indent=1))
    document = writing.document | {"format": FORMAT, "step": writing.step, "files": rows, "state_map": names["state"]}
    _put(writing.aside / DOCUMENT, json.dumps(document))
    sums = {file: digest for file, (_, digest) in rows.items()}
    sums |= {file: checksum(writing.aside / file) for file in (INDEX, DOCUMENT)}
    _put(writing.aside / SUMS, "\n".join(f"{digest}  {file}" for file, digest in sorted(sums.items())))
    _sync(writing.aside)
    final, replaced = writing.root / writing.name, writing.root / f".{writing.name}.replaced"
    if final.exists():
        final.rename(replaced)
    writing.aside.rename(final)
    _put(writing.root / f".{LATEST}", writing.name)
    (writing.root / f".{LATEST}").rename(writing.root / LATEST)
    _sync(writing.root)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in complete_ones(writing.root)[writing.keep :]:
        if old.name != writing.name:
            shutil.rmtree(old, ignore_errors=True)


def complete_ones(root: Path) -> list[Path]:
    """The checkpoints of a directory, the newest first: names of ours, and nothing else that may lie there."""
    found = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def replaced_ones(root: Path) -> list[Path]:
    """Checkpoints that were moved aside for one of the same step, which was then not completed."""
    found = [path for path in root.glob(".step-*.replaced") if _LEFTOVER.fullmatch(path.name)]
    return [path for path in found if not (root / path.name.removeprefix(".").removesuffix(".replaced")).exists()]


def remove_leftovers(root: Path) -> None:
    """Remove what a killed run left of a checkpoint that it did not finish."""
    for path in replaced_ones(root):
        path.rename(root / path.name.removeprefix(".").removesuffix(".replaced"))
    for path in root.glob(".*"):
        if _LEFTOVER.fullmatch(path.name) and not path.is_symlink():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def latest_name(root: Path) -> str | None:
    """The checkpoint that `latest` names, if it names one of ours."""
    try:
        name = (root / LATEST).read_bytes()[:64].decode("ascii", "replace").strip()
    except OSError:
        return None
    return name if _NAME.fullmatch(name) else None


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _put(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    """Have the operating system write a file or directory out."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
