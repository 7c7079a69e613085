"""Long tables, full folders and a slide of 100,000 pixels a side, killed and continued; times are printed."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from outcore.data import Scene, read_folder, read_table, write_slide
from outcore.infer import find_slides

pytestmark = pytest.mark.slow

JOB = """
import torch
from torch import nn


def model():
    return nn.Conv2d(3, 3, 16, 16)


def batch(size):
    return torch.randn(size, 3, 64, 64), None
"""


def timed(what: str, start: float) -> None:
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what}: {time.perf_counter() - start:.1f} s by the clock, pytest held at most {held:.0f} MiB")


def test_a_table_of_200_000_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 8, 8), np.uint8))
    names = [f"s{n:06}.npy" for n in range(200_000)]
    rows = "".join(f"{name},class{n % 997}\n" for n, name in enumerate(names))
    (tmp_path / "t.csv").write_text(f"path,label\n{rows}")
    start = time.perf_counter()
    table = read_table(tmp_path / "t.csv", on_bad="skip")
    timed("table of 200,000 rows, for training", start)
    assert len(table) == 200_000 and len(table.classes) == 997
    start = time.perf_counter()
    assert len(find_slides(tmp_path / "t.csv")) == 200_000
    timed("table of 200,000 rows, for infer", start)


def test_a_folder_of_100_000_files(tmp_path: Path) -> None:
    for name in ("low", "tall"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for n in range(50_000):
            (tmp_path / "data" / name / f"{n:06}.npy").touch()
    start = time.perf_counter()
    assert len(read_folder(tmp_path / "data")) == 100_000
    timed("folder of 100,000 files, for training", start)
    start = time.perf_counter()
    found = find_slides(tmp_path / "data")
    timed("folder of 100,000 files, for infer", start)
    assert len(found) == 100_000 and len({slide.name for slide in found}) == 100_000


def test_a_slide_of_100_000_pixels_a_side_is_killed_and_continued(tmp_path: Path) -> None:
    start = time.perf_counter()
    write_slide(tmp_path / "slide.tif", Scene((100_000, 100_000), share=0.02), sparse=True)
    timed("slide of 100,000 px written", start)
    (tmp_path / "job.py").write_text(JOB)
    net = torch.nn.Conv2d(3, 3, 16, 16)
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    whole = command(tmp_path, "whole.npy")
    start = time.perf_counter()
    shown = subprocess.run(whole, cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    said = json.loads(shown.stdout)
    held = (said["process_bytes"] - said["process_bytes_before"]) / 2**20
    timed(f"inferred in {said['tiles']} tiles, holding {held:.0f} MiB of 256", start)
    process = subprocess.Popen(command(tmp_path, "m.npy"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    done = tmp_path / ".m.npy.partial" / "done.jsonl"
    while process.poll() is None and not (done.is_file() and done.read_text().count("\n") > said["tiles"] // 2):
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert done.is_file() and not (tmp_path / "m.npy").exists()
    start = time.perf_counter()
    again = subprocess.run(command(tmp_path, "m.npy"), cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    continued: dict[str, Any] = json.loads(again.stdout)
    timed(f"continued after {continued['tiles_from_before']} tiles", start)
    assert 0 < continued["tiles_from_before"] < continued["tiles"]
    assert np.array_equal(np.load(tmp_path / "m.npy", mmap_mode="r"), np.load(tmp_path / "whole.npy", mmap_mode="r"))


def command(folder: Path, output: str) -> list[str]:
    told = ("--data", "slide.tif", "-o", output, "--memory", "256MiB", "--device", "cpu", "--json", "--no-overlay")
    return [sys.executable, "-m", "outcore", "infer", "job.py", "-w", "w.safetensors", *told]
