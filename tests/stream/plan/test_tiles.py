"""Tiles partition what they cover: every element of a value is in exactly one tile, whichever axes the value has."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outcore.stream.plan.tiles import Grid

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int | None, ...]]] = {
    "a map": ((2, 3, 12, 10), (None, None, 0, 1)),
    "a coarser map": ((2, 3, 5, 4), (None, None, 0, 1)),
    "a map with few rows": ((1, 1, 2, 10), (None, None, 0, 1)),
    "rows alone": ((2, 12), (None, 0)),
    "columns alone": ((10, 2), (1, None)),
    "no axis": ((2, 3), (None, None)),
}
"""Value -> its shape, and along which of the streamed axes each dimension lies."""


@pytest.mark.parametrize("counts", [(1, 1), (3, 1), (1, 4), (3, 4)])
@pytest.mark.parametrize("value", SHAPES)
def test_every_element_is_in_one_tile(value: str, counts: tuple[int, int]) -> None:
    network: Any = SimpleNamespace(
        shapes={n: shape for n, (shape, _) in SHAPES.items()}, axes={n: axes for n, (_, axes) in SHAPES.items()}
    )
    grid = Grid(counts, (12, 10))
    seen = torch.zeros(SHAPES[value][0], dtype=torch.int)
    for tile in grid.tiles():
        region = grid.region(network, value, tile)
        if region is not None:
            assert all(lo < hi for lo, hi in region)
            seen[tuple(slice(lo, hi) for lo, hi in region)] += 1
    assert bool((seen == 1).all()), seen
    assert len(grid) == len(list(grid.tiles())) == len(list(itertools.product(*map(range, counts))))
