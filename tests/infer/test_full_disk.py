"""A disk that is full while a map is written: one sentence, nothing under the final name, and the next run goes on."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from outcore.errors import FullDiskError
from outcore.infer.disk_array import DiskArray
from outcore.infer.results import ResultsFolder, replace_text
from outcore.infer.slides import SlideInput
from tests.foreign.sample import sometimes
from tests.infer.slides import infer, write_work


@pytest.mark.parametrize("shape", [(7,), (5, 9), (3, 5, 9)])
def test_pieces_of_an_array_are_those_of_numpy(tmp_path: Path, shape: tuple[int, ...]) -> None:
    made = DiskArray.create(tmp_path / "a.npy", shape, np.dtype(np.float32))
    expected = np.zeros(shape, np.float32)
    drawn = np.random.default_rng(0)
    for _ in range(20):
        low = [int(drawn.integers(n)) for n in shape]
        place = tuple(slice(a, int(drawn.integers(a, n)) + 1) for a, n in zip(low, shape, strict=True))
        place = place[: drawn.integers(1, len(shape) + 1)]
        numbers = drawn.normal(size=expected[place].shape).astype(np.float32) * drawn.integers(2)
        made[place], expected[place] = numbers, numbers
        assert np.array_equal(made[place], expected[place])
        assert np.array_equal(made[low[0]], expected[low[0]])
    made.flush()
    assert np.array_equal(np.load(made.path), expected)
    again = DiskArray.open(made.path)
    assert again.shape == shape and np.array_equal(again[:], expected)
    with pytest.raises(IndexError):
        made[shape[0]]


def test_zeros_stay_holes(tmp_path: Path) -> None:
    made = DiskArray.create(tmp_path / "a.npy", (4096, 4096), np.dtype(np.uint8))
    made[:2048] = np.zeros((2048, 4096), np.uint8)
    made.flush()
    assert made.path.stat().st_blocks * 512 < 1 << 20 < made.path.stat().st_size


@pytest.mark.parametrize(("output", "bytes_left"), [("m.tif", 20_000), ("m.npy", 20_000), ("m.tif", 130_000)])
def test_a_full_disk_is_one_sentence_and_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, bytes_left: int
) -> None:
    folder = write_work(tmp_path)
    assert infer(folder, "--data", "slide.tif", "-o", f"whole.{output[2:]}", "--memory", "1MiB").returncode == 0
    real, room = os.pwrite, [bytes_left]

    def written(handle: int, data: memoryview, at: int) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= len(data)
        return real(handle, data, at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", written)
        shown = infer(folder, "--data", "slide.tif", "-o", output, "--memory", "1MiB")
    if bytes_left > 123_000:  # all of the map was written: the disk was large enough
        assert shown.returncode == 0 and room[0] > 0
        return
    assert shown.returncode == 1 and "the disk of the output is full" in shown.stderr
    assert shown.stderr.count("\n") <= 2 and not (folder / output).exists()
    assert (folder / f".{output}.partial").is_dir()
    assert infer(folder, "--data", "slide.tif", "-o", output, "--memory", "1MiB").returncode == 0
    assert (folder / output).read_bytes() == (folder / f"whole.{output[2:]}").read_bytes()
    assert not (folder / f".{output}.partial").exists()


CROWDED = """
import sys

from outcore.cli.main import main
from outcore.infer import map_file

create = map_file.DiskArray.create


def crowded(*words):
    made = create(*words)
    with open("small/other", "wb") as other:  # there was room for the map, and then somebody else took it
        other.write(bytes(800_000))
    return made


map_file.DiskArray.create = crowded
sys.argv[0] = "outcore"
main()
"""


@pytest.fixture
def in_small_disk() -> Iterator[list[str]]:
    """The beginning of a command that mounts a disk of 256 KiB on ``small`` for itself alone."""
    told = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*told, "mount -t tmpfs none /mnt"], capture_output=True).returncode
    ):
        pytest.skip("no disk of one's own can be mounted here")
    yield told


def test_tables_say_that_the_disk_is_full(tmp_path: Path) -> None:
    """/dev/full is a file that can be opened and takes nothing."""
    with ResultsFolder(tmp_path / "out", {}) as folder:
        writes: dict[str, Callable[[], None]] = {
            "results.csv": lambda: folder.add({"path": "a.tif", "class": 1}),
            "failed.csv": lambda: folder.fail(SlideInput(tmp_path, "a.tif", "a"), "broken"),
            ".row.csv.new": lambda: replace_text(tmp_path / "out" / "row.csv", "path"),
        }
        for name, write in writes.items():
            (tmp_path / "out" / name).symlink_to("/dev/full")
            with pytest.raises(FullDiskError, match="the disk of the output is full; make room"):
                write()
    assert not (tmp_path / "out" / ".row.csv.new").is_symlink()


@sometimes
def test_a_disk_that_is_really_full_does_not_kill_the_process(tmp_path: Path, in_small_disk: list[str]) -> None:
    folder = write_work(tmp_path, size=(700, 900))
    (folder / "small").mkdir()
    shown = infer(folder, "--data", "slide.tif", "-o", "small/m.npy", "--memory", "1MiB")
    assert shown.returncode == 0
    (folder / "small" / "m.npy").unlink()
    (folder / "crowded.py").write_text(CROWDED)
    mounted = f"mount -t tmpfs -o size=900k none small && exec {sys.executable} crowded.py"
    words = "infer job.py -w w.safetensors --data slide.tif -o small/m.npy --memory 1MiB --device cpu"
    script = f"{mounted} {words}"
    done = subprocess.run([*in_small_disk, script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert "full" in done.stderr and "Traceback" not in done.stderr
