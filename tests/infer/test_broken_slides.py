"""`outcore infer` on broken slides and tables: a result, or one sentence; never a traceback, nothing left behind."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from outcore.data import tile_cache
from tests.data.mutations import FORMATS, broken
from tests.data.test_broken_inputs import bounded
from tests.infer.slides import infer, write_work


@pytest.fixture(autouse=True)
def cache_as_before():
    before = tile_cache.limit_bytes
    yield
    tile_cache.limit_bytes = before


def try_all(folder: Path, form: str, seeds: range) -> dict[int, int]:
    write_work(folder)
    codes: dict[int, int] = {}
    for seed in seeds:
        path = broken(folder, form, seed)
        out = "out" if form == "csv" else "mask.zarr"
        told = ("--data", path.name, "-o", out, "--memory", "64MiB", "--overwrite", "--no-overlay", "--json")
        with bounded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shown = infer(folder, *told)
        assert shown.returncode in (0, 1), (form, seed, shown)
        assert "Traceback" not in shown.stderr, (form, seed, shown.stderr)
        assert shown.returncode == 0 or shown.stderr.startswith("error: "), (form, seed, shown.stderr)
        assert not list(folder.glob(".*")), (form, seed)
        codes[shown.returncode] = codes.get(shown.returncode, 0) + 1
    return codes


@pytest.mark.parametrize("form", FORMATS)
def test_a_few_of_each(tmp_path: Path, form: str) -> None:
    print(form, try_all(tmp_path, form, range(4)))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_many_of_each(tmp_path: Path, form: str) -> None:
    print(form, try_all(tmp_path, form, range(2000, 2100)))
