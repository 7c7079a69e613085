"""Lazy images, reading ahead, identical tiles, random masks."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import tifffile
import torch
from torch import nn

from outcore.data import ArraySource, Batch, Scene, open_slide, write_slide
from outcore.errors import DataError, StreamError
from outcore.memory.offload.worker_threads import read_ahead
from outcore.stream import FunctionSource, stream
from outcore.stream.execute.tile_dedup import colour

from .oracle import assert_equal_to_plain, with_statistics


def classifier() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(6, 6, 3, 1, 1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 2),
    )
    return with_statistics(net).double().eval()


@pytest.mark.parametrize("workers", [0, 3])
def test_a_memory_map_of_bytes_is_read_by_tiles_and_prepared(tmp_path, workers: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 90, 70), dtype=np.uint8)
    np.save(tmp_path / "image.npy", pixels)
    mapped = np.load(tmp_path / "image.npy", mmap_mode="r")
    image = Batch((ArraySource(mapped),), dtype=torch.float64, mean=(0.5,) * 3, std=(0.2, 0.3, 0.4))
    net = classifier()
    plain = copy.deepcopy(net)
    expected = plain(image.prepare(torch.from_numpy(pixels)[None]))
    expected.square().sum().backward()
    got = stream(net, tile=24, workers=workers)(image)
    got.square().sum().backward()
    torch.testing.assert_close(got, expected)
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_no_tile_reads_much_more_than_itself() -> None:
    largest = 0

    def read(region):
        nonlocal largest
        largest = max(largest, int(np.prod([b - a for a, b in region])))
        return torch.rand([b - a for a, b in region], dtype=torch.float64)

    image = FunctionSource((1, 3, 4000, 3000), read, torch.float64)
    with torch.no_grad():
        assert stream(classifier(), tile=500)(image).shape == (1, 2)
    assert largest <= 3 * 520 * 520


def test_pixels_may_be_kept_for_the_second_pass() -> None:
    pixels = torch.rand(1, 3, 96, 64, dtype=torch.float64)
    reads = []

    def read(region):
        reads.append(region)
        return pixels[tuple(slice(*i) for i in region)].clone()

    gradients, first = [], classifier()
    for cache, expected in (("1MiB", 12), ("100KiB", 17), (0, 24)):
        net = copy.deepcopy(first)
        reads.clear()
        stream(net, tile=24, cache=cache)(FunctionSource((1, 3, 96, 64), read, torch.float64)).sum().backward()
        assert abs(len(reads) - expected) <= (0 if cache != "100KiB" else 6)
        gradients.append(net[0].weight.grad)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[1], gradients[2])


def test_reading_ahead_keeps_the_order_and_stops_with_the_reader() -> None:
    jobs = list(range(20))
    assert [(j, r) for j, r in read_ahead(jobs, lambda j: j * j, 4)] == [(j, j * j) for j in jobs]
    assert [(j, r) for j, r in read_ahead(jobs, lambda j: j * j, 0)] == [(j, j * j) for j in jobs]
    before = threading.active_count()
    for _ in read_ahead(jobs, lambda j: j, 3):
        break
    assert threading.active_count() == before


def test_a_source_that_fails_says_so_and_leaves_no_thread() -> None:
    image = FunctionSource((1, 3, 64, 64), lambda region: torch.zeros(1, 3, 2, 2), torch.float64)
    with pytest.raises(StreamError, match="returned shape"):
        stream(classifier(), tile=16, workers=2)(image)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_timeline_of_a_step_shows_every_read_and_every_wait(workers: int) -> None:
    image = FunctionSource(
        (1, 3, 64, 64), lambda r: torch.rand([b - a for a, b in r], dtype=torch.float64), torch.float64
    )
    streamed = stream(classifier(), tile=32, workers=workers)
    streamed(image).sum().backward()
    counts = streamed.counts
    assert len(counts.reads) == counts.forward + counts.backward == 8
    assert len(counts.waits) == 8 + 2  # and one at the end of each pass
    assert sum(b - a for a, b in counts.waits) == pytest.approx(counts.waited_s)
    ends = sorted(b for _, _, b in counts.reads)
    tiles = [b for i, (_, b) in enumerate(counts.waits) if i not in (4, 9)]
    assert all(read <= there for read, there in zip(ends, tiles, strict=True))
    assert ({name for name, _, _ in counts.reads} == {threading.main_thread().name}) == (workers == 0)


def test_glass_is_computed_once_in_both_passes() -> None:
    x = torch.full((1, 3, 256, 224), 0.92, dtype=torch.float64)
    x[:, :, 100:130, 60:100] = torch.rand(1, 3, 30, 40, dtype=torch.float64)
    net = classifier()
    plain = copy.deepcopy(net)
    expected = plain(x).square().sum()
    expected.backward()
    streamed = stream(net, tile=16)
    streamed(x).square().sum().backward()
    assert streamed.counts.forward < 60 < streamed.counts.reused
    for (name, mine), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12, msg=name)
    maps = nn.Sequential(*net[:6])
    torch.testing.assert_close(stream(maps, tile=16)(x), maps(x))


def test_glass_that_a_random_layer_touches_is_not_shared() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(4, 2, 3, padding=1)).train()
    streamed = stream(net, tile=8)
    streamed(torch.ones(1, 3, 32, 32))
    assert streamed.counts.reused == 0


@pytest.mark.parametrize("layer", [nn.Dropout(0.4), nn.Dropout2d(0.4)])
def test_masks_do_not_depend_on_the_tiling_and_are_the_same_in_both_passes(layer) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layer, nn.Conv2d(8, 2, 3, padding=1)).double().train()
    x = torch.randn(2, 3, 40, 36, dtype=torch.float64)
    outputs, gradients = [], []
    for tile in (1000, 9, (40, 7)):
        net.zero_grad()
        streamed = stream(net, tile=tile)
        out = streamed(x)
        out.square().sum().backward()
        outputs.append(out.detach())
        gradients.append(net[0].weight.grad.clone())
        assert not torch.equal(streamed(x), out)  # the next step draws anew
    for out, gradient in zip(outputs[1:], gradients[1:], strict=True):
        torch.testing.assert_close(out, outputs[0])
        torch.testing.assert_close(gradient, gradients[0])


def test_dropout_keeps_the_share_it_should() -> None:
    net = nn.Sequential(nn.Dropout(0.3)).train()
    out = stream(net, tile=50)(torch.ones(1, 4, 200, 200))
    kept = (out != 0).double().mean().item()
    assert abs(kept - 0.7) < 0.01
    assert torch.allclose(out[out != 0], torch.tensor(1 / 0.7))


def test_a_plain_training_loop_lowers_the_loss() -> None:
    net = classifier()
    streamed = stream(net, tile=20)
    optimizer = torch.optim.Adam(streamed.parameters(), 1e-2)
    x, y = torch.randn(4, 3, 50, 40, dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(streamed(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert set(streamed.state_dict()) == set(net.state_dict())


def test_another_size_is_prepared_once_and_remembered() -> None:
    streamed = stream(classifier(), tile=20)
    for side in (40, 52, 40, 52):
        streamed(torch.randn(1, 3, side, 40, dtype=torch.float64))
    assert len(streamed._prepared) == 2


def test_maps_may_be_kept_on_the_host() -> None:
    assert_equal_to_plain(classifier(), torch.randn(1, 3, 50, 40), tile=16, boundary="4", maps_on_host=True)


class Magnified(nn.Module):
    """Sees a slide at two magnifications."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1))
        self.coarse, self.head = nn.Conv2d(3, 4, 3, 1, 1), nn.Linear(4, 2)

    def forward(self, fine, coarse):
        return self.head((self.fine(fine) + self.coarse(coarse)).relu().mean((2, 3)))


def test_two_magnifications_of_one_slide_are_read_lazily(tmp_path) -> None:
    path = write_slide(tmp_path / "s.tif", Scene((1280, 1536), share=0.3, tile=128))
    slide = open_slide(path)
    inputs = tuple(Batch((slide.at(level=level),), dtype=torch.float64) for level in (0, 1))
    assert inputs[1].shape[2:] == (320, 384)
    net = Magnified().double()
    plain = copy.deepcopy(net)
    stream(net, tile=300, workers=2)(*inputs).square().sum().backward()
    plain(*(x.tensor() for x in inputs)).square().sum().backward()
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-10)


def test_a_damaged_tile_stops_the_step_by_name_or_is_glass_and_listed(tmp_path) -> None:
    path = write_slide(tmp_path / "s.tif", Scene((256, 256), share=1.0, tile=64))
    with tifffile.TiffFile(path) as file:
        offset, count = file.pages[0].dataoffsets[6], file.pages[0].databytecounts[6]
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(b"\xff" * count)
    streamed = stream(classifier(), tile=100, workers=2)
    with pytest.raises(DataError, match=r"s\.tif: tile \(1, 2\) of level 0"):
        streamed(Batch((open_slide(path),), dtype=torch.float64))
    slide = open_slide(path, on_damage="white")
    lazy = Batch((slide,), dtype=torch.float64)
    streamed(lazy).sum().backward()
    assert [d.index for d in slide.damage] == [(1, 2)]
    torch.testing.assert_close(streamed(lazy), streamed.model(lazy.tensor()))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.int16, torch.float32])
def test_the_colour_of_a_crop_is_found_for_every_kind_of_number(dtype: torch.dtype) -> None:
    crop = torch.full((1, 2, 8, 8), 40_000 if dtype in (torch.uint16, torch.uint32, torch.float32) else 40).to(dtype)
    assert colour(crop) == (crop.flatten()[0].item(),) * 2
    crop[0, 1, 5, 3] = 7
    assert colour(crop) is None
