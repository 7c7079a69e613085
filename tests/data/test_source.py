"""A source gives the boxes of a tensor; a batch of sources is what a network is given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outcore.data import ArraySource, Batch, DataError, Source
from outcore.data.source import spans


def test_any_box_is_that_of_the_array() -> None:
    array = np.arange(3 * 5 * 7, dtype=np.uint8).reshape(3, 5, 7)
    source = ArraySource(array)
    assert isinstance(source, Source) and source.shape == (3, 5, 7) and source.dtype is torch.uint8
    assert np.array_equal(source.read([(1, 3), slice(2, 4), (0, 7)]).numpy(), array[1:3, 2:4])


def test_what_was_read_is_the_readers_own() -> None:
    held = torch.zeros(2, 4)
    ArraySource(held).read([(0, 2), (0, 4)]).fill_(1)
    array = np.zeros((2, 4))
    ArraySource(array).read([(0, 2), (0, 4)]).fill_(1)
    assert not held.any() and not array.any()


@pytest.mark.parametrize("region", [[(0, 6)], [(0, 5), (3, 2)], [(-1, 2), (0, 2)], [slice(0, 4, 2), (0, 1)]])
def test_a_box_outside_is_refused(region: list[tuple[int, int]]) -> None:
    with pytest.raises(DataError, match="5x4"):
        spans(region, (5, 4))


def test_a_batch_is_scaled_by_channel_whatever_box_is_read() -> None:
    images = torch.randint(0, 256, (2, 3, 6, 5), dtype=torch.uint8)
    batch = Batch(tuple(map(ArraySource, images)), mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3))
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)
    expected = (images.float() / 255 - mean) / std
    assert batch.shape == (2, 3, 6, 5)
    assert torch.equal(batch.tensor(), expected)
    box = batch.read([(1, 2), (0, 3), (2, 4), (0, 3)])
    assert torch.equal(box, images[1:2, :, 2:4, 0:3])
    assert torch.equal(batch.prepare(box), expected[1:2, :, 2:4, 0:3])


def test_preparing_leaves_what_was_read_alone() -> None:
    held = torch.ones(1, 1, 2, 2)
    assert torch.equal(Batch((ArraySource(held[0]),), mean=(1.0,)).prepare(held), torch.zeros(1, 1, 2, 2))
    assert (held == 1).all()


def test_numbers_for_other_channels_are_refused() -> None:
    with pytest.raises(DataError, match="mean has 3 numbers; the images have 1 channel"):
        Batch((ArraySource(torch.zeros(1, 4, 4)),), mean=(0.1, 0.2, 0.3))


def test_a_batch_of_two_sizes_is_refused() -> None:
    with pytest.raises(DataError, match=r"3x4x4, 3x5x4.*--batch 1"):
        Batch((ArraySource(torch.zeros(3, 4, 4)), ArraySource(torch.zeros(3, 5, 4))))


class Plain(ArraySource):
    """A source that knows where it has one colour all over: in its first row."""

    def colour(self, region: list[tuple[int, int]]) -> tuple[int, ...] | None:
        (_, rows, _) = region
        return (7, 8) if tuple(rows) == (0, 1) else None


def test_a_batch_knows_a_colour_where_all_of_its_sources_do() -> None:
    array = torch.zeros(2, 4, 4)
    plain, other = Plain(array), ArraySource(array)
    assert Batch((plain, plain)).colour([(0, 2), (0, 2), (0, 1), (0, 4)]) == (7, 8, 7, 8)
    assert Batch((plain, plain)).colour([(1, 2), (0, 2), (0, 1), (0, 4)]) == (7, 8)
    assert Batch((plain, plain)).colour([(0, 2), (0, 2), (0, 2), (0, 4)]) is None
    assert Batch((plain, other)).colour([(0, 2), (0, 2), (0, 1), (0, 4)]) is None
    assert Batch((plain, other)).colour([(0, 1), (0, 2), (0, 1), (0, 4)]) == (7, 8)


def test_nothing_of_a_batch_has_the_shape_of_the_box() -> None:
    batch = Batch((ArraySource(torch.zeros(2, 4, 4, dtype=torch.uint8)),) * 3)
    nothing = batch.read([(1, 1), (0, 2), (0, 3), (2, 4)])
    assert nothing.shape == (0, 2, 3, 2) and nothing.dtype is torch.uint8
