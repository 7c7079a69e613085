"""What is read back: damaged, foreign and hostile checkpoints are passed over or refused, and only ours are removed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outcore.errors import CheckpointError
from outcore.run.checkpoint.files import checksum
from outcore.run.checkpoint.restore import has_checkpoint, read_weights
from outcore.train.run_folder.saving import load_state, save_state


def save(root: Path, step: int, keep: int = 2) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float(step))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    save_state(root, model, optimizer, scaler, step=step, samples=step, extra={"last_epoch": step}, keep=keep)


def load(root: Path, model: nn.Module | None = None) -> Any:
    model = nn.Linear(2, 2) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = load_state(root, model, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    return state["last_epoch"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(tmp_path, step)
    return tmp_path


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_retention_removes_its_own_checkpoints_and_nothing_else(root: Path) -> None:
    theirs = ["step-good", "step-0000000001.backup", "step-16", "steps", "step-notes.txt", ".step-mine.partial"]
    for name in theirs:
        (root / name).mkdir()
    for step in (3, 4, 5):
        save(root, step)
    assert names(root) == sorted([*theirs, "latest", "step-0000000004", "step-0000000005"])
    save(root, 4, keep=1)  # a run that went back: what `latest` names stays, though another is newer
    assert {"step-0000000004", "step-0000000005"} <= set(names(root)) and load(root) == 4


def test_a_bit_anywhere_in_a_checkpoint_is_noticed(root: Path) -> None:
    drawn = random.Random(0)
    newest = root / "step-0000000002"
    files = [path for path in sorted(newest.iterdir()) for _ in range(12)]
    assert {path.name for path in files} >= {"checkpoint.json", "model.safetensors.index.json", "SHA256SUMS"}
    for path in files:
        good = path.read_bytes()
        bad = bytearray(good)
        bad[drawn.randrange(len(bad))] ^= 1 << drawn.randrange(8)
        path.write_bytes(bad)
        with pytest.warns(UserWarning, match="passed over"):
            assert load(root) == 1, path.name
        path.write_bytes(good)
    assert load(root) == 2


@pytest.mark.parametrize("content", ["[]", "null", "{}", "7", '"text"', "", "{", "\x00\x01", "[" * 100_000])
@pytest.mark.parametrize("file", ["checkpoint.json", "model.safetensors.index.json", "SHA256SUMS", "../latest"])
def test_documents_with_wrong_content_are_passed_over(root: Path, file: str, content: str) -> None:
    path = root / "step-0000000002" / file
    path.write_text(content)
    resum(root / "step-0000000002")
    if file == "../latest":
        assert load(root) == 2
    else:
        with pytest.warns(UserWarning, match="passed over"):
            assert load(root) == 1


def keys(path: Path) -> Iterator[str]:
    yield from json.loads(path.read_text())


def test_a_document_that_lacks_a_key_is_passed_over_by_name(root: Path) -> None:
    newest = root / "step-0000000002"
    good = (newest / "checkpoint.json").read_text()
    for key in json.loads(good):
        if key in ("plan", "network"):
            continue
        (newest / "checkpoint.json").write_text(json.dumps({k: v for k, v in json.loads(good).items() if k != key}))
        resum(newest)
        with pytest.warns(UserWarning, match=f"checkpoint.json: {key} is not there; expected"):
            assert load(root) == 1


def test_an_index_that_points_outside_its_folder_is_refused(root: Path, tmp_path: Path) -> None:
    newest = root / "step-0000000002"
    shutil.copytree(newest, tmp_path / "elsewhere")
    for where in ("../elsewhere/weights-00001-of-00001.safetensors", "/etc/passwd", "a/b.safetensors", "..", 7):
        index = json.loads((newest / "model.safetensors.index.json").read_text())
        index["weight_map"]["weight"] = where
        (newest / "model.safetensors.index.json").write_text(json.dumps(index))
        resum(newest)
        with pytest.warns(UserWarning, match=r"weight_map\.weight is .*; expected the name of a \.safetensors file in"):
            assert read_weights(root)["weight"][0, 0] == 1.0


def test_a_checkpoint_of_before_checksums_is_still_read(root: Path) -> None:
    newest = root / "step-0000000002"
    (newest / "SHA256SUMS").unlink()
    with pytest.warns(UserWarning, match="it is not complete"):
        assert load(root) == 1
    document = json.loads((newest / "checkpoint.json").read_text()) | {"format": 1}
    (newest / "checkpoint.json").write_text(json.dumps(document))
    assert load(root) == 2


def test_what_a_killed_run_left_is_removed_or_put_back(root: Path) -> None:
    (root / ".step-0000000009.partial").mkdir()
    (root / ".latest").write_text("step-00000")
    (root / "step-0000000002").rename(root / ".step-0000000002.replaced")  # killed between two renames
    assert load(root) == 1
    shutil.rmtree(root / "step-0000000001")
    assert load(root) == 2
    save(root, 3)
    assert names(root) == ["latest", "step-0000000002", "step-0000000003"]


def test_a_directory_without_a_finished_checkpoint_has_none(tmp_path: Path) -> None:
    (tmp_path / ".step-0000000001.partial").mkdir()
    assert not has_checkpoint(tmp_path) and not has_checkpoint(tmp_path / "absent")
    save(tmp_path, 1)
    assert has_checkpoint(tmp_path) and has_checkpoint(tmp_path / "step-0000000001")


def test_a_model_with_a_layer_less_is_another(root: Path) -> None:
    with pytest.raises(CheckpointError, match="has bias, which the model has not"):
        load(root, nn.Linear(2, 2, bias=False))


def resum(path: Path) -> None:
    """Make the checksums fit what was changed on purpose."""
    sums = path / "SHA256SUMS"
    if not sums.read_text().startswith(tuple("0123456789abcdef")):
        return
    rows = [line.partition("  ")[2] for line in sums.read_text().splitlines()]
    if all(rows):
        sums.write_text("".join(f"{checksum(path / file)}  {file}\n" for file in rows))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight


def test_tied_weights_are_stored_under_all_their_names(tmp_path: Path) -> None:
    model = Tied()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False)
    save_state(tmp_path, model, optimizer, scaler, step=1, samples=1, extra={"last_epoch": 7}, keep=1)
    stored = read_weights(tmp_path)
    assert stored.keys() == {"embed.weight", "out.weight"}
    assert all(torch.equal(tensor, model.embed.weight) for tensor in stored.values())
    other = Tied()
    assert load(tmp_path, other) == 7
    assert torch.equal(other.out.weight, model.embed.weight) and other.out.weight is other.embed.weight
