"""The budget of a slide contains what reading it takes; the process holds what was predicted, and says so."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

from outcore.data import Batch, Scene, open_slide, tile_cache, write_slide
from outcore.data.limits import limits
from outcore.errors import DataError, PlanError
from outcore.infer import SlideRunner, load_network
from outcore.machine.units import parse_bytes
from outcore.stream import stream
from tests.infer.slides import infer, write_work

_PYTHON_ITSELF = 64 << 20
"""Libraries that are loaded while a network runs for the first time, and threads."""


@pytest.fixture(autouse=True)
def cache_as_before():
    before = tile_cache.limit_bytes
    yield
    tile_cache.limit_bytes = before


def one_large_tile(path: Path, side: int = 16_384) -> None:
    """A small file: one tile of white."""
    row = zlib.compressobj(9)
    packed = b"".join(row.compress(bytes([255]) * (side * 3)) for _ in range(side)) + row.flush()
    tifffile.imwrite(
        path,
        iter([packed]),
        shape=(side, side, 3),
        dtype=np.uint8,
        tile=(side, side),
        photometric="rgb",
        compression="adobe_deflate",
    )
    assert path.stat().st_size < 2 << 20


def test_a_tile_that_does_not_fit_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    folder = write_work(tmp_path)
    one_large_tile(folder / "large.tif")
    shown = infer(folder, "--data", "large.tif", "-o", "m.tif", "--memory", "64MiB")
    assert shown.returncode == 1 and "16384 x 16384 px takes 768.0 MiB, the limit is 64.0 MiB" in shown.stderr
    shown = infer(folder, "--data", "large.tif", "-o", "m.tif", "--memory", "1GiB")
    assert shown.returncode == 1 and "stored in tiles of 16384 x 16384 px, 2.2 GiB" in shown.stderr
    assert "give at least" in shown.stderr and limits.piece_bytes == 1 << 30


def test_what_is_said_to_be_enough_is_enough(tmp_path: Path) -> None:
    folder = write_work(tmp_path, size=(500, 700))
    network = load_network(str(folder / "job.py"), weights=folder / "w.safetensors")
    with pytest.raises(PlanError) as refused:
        SlideRunner(network, memory="50KiB").open(folder / "slide.tif")
    least = refused.value.least_bytes
    assert least is not None
    opened = SlideRunner(network, memory=str(least)).open(folder / "slide.tif")
    assert opened.fitted.peak_bytes <= least


@pytest.mark.parametrize("memory", ["600KiB", "4MiB", "64MiB"])
def test_tiles_kernels_reading_and_cache_share_the_budget(tmp_path: Path, memory: str) -> None:
    folder = write_work(tmp_path, size=(500, 700))
    runner = SlideRunner(load_network(str(folder / "job.py"), weights=folder / "w.safetensors"), memory=memory)
    opened = runner.open(folder / "slide.tif")
    assert opened.fitted.peak_bytes <= parse_bytes(memory)
    assert tile_cache.limit_bytes == opened.fitted.cache_bytes <= parse_bytes(memory) // 8


def test_an_image_that_is_resized_must_fit_whole(tmp_path: Path) -> None:
    folder = write_work(tmp_path, size=(500, 700))
    network = load_network(str(folder / "job.py"), weights=folder / "w.safetensors")
    small = replace(network, data=replace(network.data, resize=32))
    with pytest.raises(DataError, match="is read whole, because the run resizes"):
        SlideRunner(small, memory="4MiB").open(folder / "slide.tif")
    assert SlideRunner(small, memory="32MiB").open(folder / "slide.tif").image.shape[-1] == 32


@pytest.mark.slow
@pytest.mark.parametrize("memory", [48, 160])
def test_the_process_holds_no_more_than_the_budget_beside_python(tmp_path: Path, memory: int) -> None:
    folder = write_work(tmp_path)
    write_slide(folder / "large.tif", Scene((3000, 3000), share=0.3))
    told = ("--data", "large.tif", "-o", "m.tif", "--memory", f"{memory}MiB", "--json", "--device", "cpu")
    command = [sys.executable, "-m", "outcore", "infer", "job.py", "-w", "w.safetensors", *told]
    shown = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    said = json.loads(shown.stdout)
    held = said["process_bytes"] - said["process_bytes_before"]
    print(f"budget {memory} MiB, predicted {said['predicted_bytes'] / 2**20:.0f}, held {held / 2**20:.0f}")
    assert said["predicted_bytes"] <= memory << 20 and held <= (memory << 20) + _PYTHON_ITSELF


def test_twins_of_many_colours_are_not_kept(tmp_path: Path) -> None:
    """Every tile is of one colour, and every colour another: results for all of them would be the whole map."""
    net = torch.nn.Conv2d(1, 4, 1)
    image = np.repeat(np.repeat(np.arange(16, dtype=np.float32).reshape(4, 4), 32, 0), 32, 1)[None]
    slide = open_slide(image)
    parts = []
    for region, part in stream(net, tile=32).tiles(Batch((slide,))):
        assert sum(ref() is not None for ref in parts) <= 1
        parts.append(weakref.ref(part))
        del region, part
    assert len(parts) == 16
