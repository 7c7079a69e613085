"""Parts of values: disjoint, complete, and where they were asked to be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import PlanError
from outcore.ops.region import elements
from outcore.spatial.parts import PartGrid, intersection
from outcore.stream.network import RegionNetwork


@pytest.mark.parametrize("counts", [(1, 1), (2, 3), (3, 1), (4, 4)])
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (16, 3)])
def test_parts_are_disjoint_and_complete(counts: tuple[int, ...], size: tuple[int, int]) -> None:
    network = RegionNetwork(outcore.capture(nn.Conv2d(2, 2, 1), torch.randn(1, 2, *size)))
    (image,) = network.graph.inputs
    for grid in (
        PartGrid(counts),
        PartGrid(counts, tuple(tuple((k + 1) / (n + 2) for k in range(n - 1)) for n in counts)),
    ):
        parts = [part for part in grid.owners(network, image) if part is not None]
        assert sum(elements(part) for part in parts) == 2 * size[0] * size[1]
        assert all(intersection(a, b) is None for i, a in enumerate(parts) for b in parts[:i])


@pytest.mark.parametrize(("counts", "cuts"), [((0, 2), ()), ((), ()), ((2,), ((0.2,), (0.3,))), ((3,), ((0.6, 0.4),))])
def test_a_grid_that_is_none_is_refused(counts: tuple[int, ...], cuts: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(PlanError):
        PartGrid(counts, cuts)
