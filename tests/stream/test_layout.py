"""Tiles of a channels-last network stay channels last, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.models import UNet
from outcore.stream import stream
from outcore.stream.execute.map_store import memory_format
from outcore.stream.execute.tile_run import fork
from outcore.stream.rules.border import sliced

HELD = ((0, 1), (0, 4), (10, 30), (5, 25))
REGIONS = (HELD, ((0, 1), (0, 4), (12, 30), (5, 24)), ((0, 1), (1, 3), (10, 11), (7, 25)))
FORMATS = [torch.contiguous_format, torch.channels_last]


def cut(value: torch.Tensor, region) -> torch.Tensor:
    """A region, as torch cuts it."""
    return value[tuple(slice(lo - a, hi - a) for (lo, hi), (a, _) in zip(region, HELD, strict=True))]


def stored(tensor: torch.Tensor) -> torch.memory_format:
    """How torch's own operations take a tensor to be stored."""
    return torch._prims_common.suggest_memory_format(tensor)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("regions", [REGIONS, REGIONS[1:], REGIONS[2:]])
def test_regions_and_their_gradients_are_stored_as_the_value(form, regions):
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(1, 4, 20, 20, dtype=torch.float64, generator=generator).to(memory_format=form)
    value.requires_grad_()
    ours = fork(value, HELD, regions, [False] * len(regions))
    plain = [cut(value, region) for region in regions]
    assert all(stored(part) == form for part in ours)
    drawn = (torch.randn(part.shape, dtype=torch.float64, generator=generator) for part in plain)
    sent = [gradient.to(memory_format=form) for gradient in drawn]
    (got,) = torch.autograd.grad(ours, value, sent)
    (wanted,) = torch.autograd.grad(plain, value, sent)
    torch.testing.assert_close(got, wanted)
    assert stored(got) == form


@pytest.mark.parametrize("form", FORMATS)
def test_a_region_is_a_slice(form):
    value = torch.randn(1, 4, 20, 20, dtype=torch.float64).to(memory_format=form).requires_grad_()
    for region in REGIONS:
        ours, plain = sliced(value, HELD, region), cut(value, region)
        assert torch.equal(ours, plain)
        (got,), (wanted,) = (torch.autograd.grad(x.square().sum(), value) for x in (ours, plain))
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("form", FORMATS)
def test_the_order_of_a_region_is_that_of_the_whole(form):
    whole = torch.zeros(1, 4, 20, 20).to(memory_format=form)
    assert memory_format(whole) == memory_format(whole[:, :, 3:9, 2:7]) == memory_format(whole[:, 1:3]) == form


class Layouts(TorchDispatchMode):
    """Operations that got an image channels first."""

    watched = ("convolution", "cat", "max_pool2d", "threshold", "relu")

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.turned: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if name.startswith(self.watched):
            listed = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a])]
            images = [t for t in listed if isinstance(t, torch.Tensor) and t.dim() == 4 and min(t.shape[1:]) > 3]
            self.seen.add(name)
            self.turned |= {name for t in images if stored(t) != torch.channels_last}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("tile", [(64, 64), (32, 128)])
def test_no_tile_of_a_unet_is_turned(tile):
    net = UNet(width=8, depth=2).eval().to(memory_format=torch.channels_last)
    image, target = torch.rand(1, 3, 128, 128), torch.randint(0, 2, (1, 128, 128))
    model = stream(net, tile=tile)
    model.loss(image, target=target, loss=torch.nn.functional.cross_entropy)  # prepared
    with Layouts() as layouts:
        model.loss(image, target=target, loss=torch.nn.functional.cross_entropy).backward()
    assert {"convolution", "convolution_backward", "cat"} <= layouts.seen
    assert not layouts.turned
