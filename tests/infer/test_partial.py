"""Nothing that exists is destroyed, and nothing is there under its name before it is complete."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from outcore.data import open_slide
from outcore.errors import DataError
from outcore.infer import one_slide
from outcore.infer.map_file import Progress
from outcore.infer.partial import Partial
from tests.foreign.sample import sometimes
from tests.infer.slides import infer, write_work


def read_map(path: Path) -> np.ndarray:
    level = open_slide(path).at(level=0)
    return level.read([(0, n) for n in level.shape]).numpy()


@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_a_folder_of_the_users_is_never_emptied(tmp_path: Path, more: tuple[str, ...]) -> None:
    folder = write_work(tmp_path)
    (folder / "notes.zarr").mkdir()
    (folder / "notes.zarr" / "thesis.txt").write_text("years of work")
    shown = infer(folder, "--data", "slide.tif", "-o", "notes.zarr", *more)
    assert shown.returncode == 1 and "notes.zarr is a folder, and is not replaced; say another -o" in shown.stderr
    assert (folder / "notes.zarr" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("name", ["mask.tif", "mask.zarr", "mask.npy"])
def test_what_exists_is_replaced_only_when_asked(tmp_path: Path, name: str) -> None:
    folder = write_work(tmp_path)
    told = ("--data", "slide.tif", "-o", name, "--json")
    first = infer(folder, *told)
    assert first.returncode == 0, first.stderr
    before = {p: p.stat().st_mtime_ns for p in sorted(folder.rglob("*")) if "cache" not in str(p)}
    refused = infer(folder, *told)
    assert refused.returncode == 1 and f"{name} exists; say another -o, or --overwrite" in refused.stderr
    assert before == {p: p.stat().st_mtime_ns for p in sorted(folder.rglob("*")) if "cache" not in str(p)}
    again = infer(folder, *told, "--overwrite")
    assert again.returncode == 0, again.stderr
    assert not list(folder.glob(".*"))


def test_a_mask_beside_the_data_is_not_replaced_without_a_word(tmp_path: Path) -> None:
    folder = write_work(tmp_path)
    (folder / "slide.mask.tif").write_text("drawn by hand")
    shown = infer(folder, "--data", "slide.tif")
    assert shown.returncode == 1 and "slide.mask.tif exists" in shown.stderr
    assert (folder / "slide.mask.tif").read_text() == "drawn by hand"


@pytest.mark.parametrize("target", ["slide.tif", "./slide.tif", "link.tif", "hard.tif", "w.safetensors", "job.py", "."])
def test_what_is_read_is_never_written(tmp_path: Path, target: str) -> None:
    folder = write_work(tmp_path)
    (folder / "link.tif").symlink_to("slide.tif")
    os.link(folder / "slide.tif", folder / "hard.tif")
    before = [(folder / name).read_bytes() for name in ("slide.tif", "w.safetensors", "job.py")]
    shown = infer(folder, "--data", "slide.tif", "-o", target, "--overwrite")
    assert shown.returncode == 1 and "would destroy" in shown.stderr
    assert before == [(folder / name).read_bytes() for name in ("slide.tif", "w.safetensors", "job.py")]


def test_an_output_inside_of_the_data_is_refused(tmp_path: Path) -> None:
    import zarr

    folder = write_work(tmp_path)
    zarr.create_array(str(folder / "in.zarr"), shape=(3, 64, 64), chunks=(3, 64, 64), dtype="uint8")
    shown = infer(folder, "--data", "in.zarr", "-o", "in.zarr/mask.tif")
    assert shown.returncode == 1 and "would destroy in.zarr" in shown.stderr


@pytest.mark.parametrize("name", ["mask.tif", "mask.zarr", "mask.npy"])
def test_an_interrupted_run_leaves_nothing_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = write_work(tmp_path)
    told = ("--data", "slide.tif", "--memory", "500KiB", "--workers", "0", "--json", "--heat", "1")
    whole = infer(folder, *told, "-o", f"whole{Path(name).suffix}")
    tiles = json.loads(whole.stdout)["tiles"]
    assert tiles > 4
    fill = one_slide._Maps.fill
    filled = []

    def stop(self, *args):
        if len(filled) == 3:
            raise KeyboardInterrupt
        filled.append(1)
        return fill(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(one_slide._Maps, "fill", stop)
        shown = infer(folder, *told, "-o", name)
    assert shown.returncode == 130
    assert not (folder / name).exists() and (folder / f".{name}.partial").is_dir()
    again = infer(folder, *told, "-o", name)
    assert again.returncode == 0, again.stderr
    said = json.loads(again.stdout)
    assert said["tiles_from_before"] == 3 and said["shares"] == json.loads(whole.stdout)["shares"]
    assert not (folder / f".{name}.partial").exists()
    assert np.array_equal(read_map(folder / name), read_map(folder / f"whole{Path(name).suffix}"))
    assert np.array_equal(read_map(folder / "mask.heat.tif"), read_map(folder / "whole.heat.tif"))


def test_work_for_something_else_is_thrown_away(tmp_path: Path) -> None:
    for about, kept in (({"slide": 1}, True), ({"slide": 2}, False)):
        with pytest.raises(KeyboardInterrupt), Partial(tmp_path / "a.tif") as partial:
            partial.begin({"slide": 1})
            (partial.folder / "map.npy").write_text("half")
            raise KeyboardInterrupt
        with Partial(tmp_path / "a.tif") as partial:
            assert partial.begin(about) is kept and (partial.folder / "map.npy").exists() is kept
        assert not partial.folder.exists()


def test_a_refusal_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError), Partial(tmp_path / "a.tif") as partial:
        partial.begin({})
        raise DataError("a tile is damaged")
    assert not list(tmp_path.iterdir())


def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    with Partial(tmp_path / "a.tif"):
        with pytest.raises(DataError, match=r"a\.tif is being written by another process"), Partial(tmp_path / "a.tif"):
            pass
        assert (tmp_path / ".a.tif.partial").is_dir()


@sometimes
def test_a_killed_run_leaves_nothing_under_its_name_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    folder = write_work(tmp_path, size=(1500, 1500))
    told = ("--data", "slide.tif", "--memory", "500KiB", "--workers", "0", "-o", "mask.tif")
    command = [sys.executable, "-m", "outcore", "infer", "job.py", "-w", "w.safetensors", *told, "--device", "cpu"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    partial = folder / ".mask.tif.partial" / "map.npy"
    while process.poll() is None and not partial.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert partial.exists() and not (folder / "mask.tif").exists()
    again = infer(folder, *told)
    assert again.returncode == 0, again.stderr
    assert (folder / "mask.tif").exists() and not list(folder.glob(".*"))


def test_a_region_is_listed_once_and_read_back_with_its_counts(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "done.jsonl", [])
    progress.note(((0, 4), (0, 4)), (3, 13))
    progress.sync()
    progress.note(((4, 8), (0, 4)), (1, 0, 5))
    progress.sync()
    progress.sync()
    assert len((tmp_path / "done.jsonl").read_text().splitlines()) == 2
    with (tmp_path / "done.jsonl").open("a") as file:
        file.write('{"region": [[8, ')  # cut off
    again = Progress(tmp_path / "done.jsonl", [])
    again.read()
    assert again.filled == {((0, 4), (0, 4)), ((4, 8), (0, 4))} and again.counts == [4, 13, 5]
