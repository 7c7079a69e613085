"""The networks that people train on large images, over grids of ranks, beside plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.models import AmoebaNetD, ReLayNet, UNet
from outcore.spatial.communicator import Communicator, run_on_threads
from outcore.spatial.forecast import bytes_of_ranks
from outcore.spatial.virtual import VirtualRanks
from tests.foreign.shim import define_torchvision_operators

from .oracle import assert_split_is_plain

define_torchvision_operators()


class DeepLab(nn.Module):
    """Strides, then dilated branches side by side with a pooled one, then up to the size of the image."""

    def __init__(self, rates: tuple[int, ...] = (1, 2, 4)) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.branches = nn.ModuleList(nn.Conv2d(8, 6, 3, padding=r, dilation=r) for r in rates)
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 6, 1), nn.ReLU())
        self.project = nn.Sequential(nn.Conv2d(6 * len(rates) + 6, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.classify = nn.Conv2d(8, 3, 1)

    def forward(self, x):
        y = self.stem(x)
        pooled = F.interpolate(self.pooled(y), y.shape[2:], mode="bilinear", align_corners=False)
        y = self.project(torch.cat([*(branch(y) for branch in self.branches), pooled], 1))
        return F.interpolate(self.classify(y), x.shape[2:], mode="bilinear", align_corners=False)


class SegFormer(nn.Module):
    """Overlapping patches, layer norm over channels, attention over all places, a depthwise feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed1, self.embed2 = nn.Conv2d(3, 8, 7, 4, 3), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(16)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        y = self.embed1(x)
        y = self.norm1(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = self.embed2(F.gelu(self.depthwise(y)) + y)
        size = y.shape[2:]
        y = y.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm2(y)).chunk(3, -1)
        y = y + self.out(F.scaled_dot_product_attention(q, k, v))
        return self.head(y).transpose(1, 2).unflatten(2, size)


def _inception() -> nn.Module:
    import torchvision

    net = torchvision.models.inception_v3(weights=None, init_weights=False, aux_logits=False)
    net.dropout = nn.Identity()
    return net


def _torchvision(name: str) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet": (lambda: UNet(3, 2, width=3, depth=2), (1, 3, 39, 34)),
    "unet3d": (lambda: UNet(2, 2, width=3, depth=2, dims=3), (1, 2, 12, 9, 13)),
    "deeplab": (DeepLab, (2, 3, 67, 50)),
    "segformer": (SegFormer, (1, 3, 70, 61)),
    "relaynet": (lambda: ReLayNet(1, 3, width=4), (1, 1, 40, 24)),
}
LARGE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "amoebanet": (lambda: AmoebaNetD(5, cells=3, filters=24), (2, 3, 72, 65)),
    "unet of five levels": (lambda: UNet(3, 2, width=4), (2, 3, 83, 70)),
    "resnet50": (lambda: _torchvision("resnet50"), (1, 3, 131, 96)),
    "densenet121": (lambda: _torchvision("densenet121"), (1, 3, 101, 96)),
    "inception": (_inception, (1, 3, 179, 163)),
}
EVERY = NETWORKS | LARGE
GRIDS = ((1, 2), (2, 1), (2, 2), (1, 3))


def _assert_deep(split: VirtualRanks) -> None:
    """Nearly all of the network runs on parts, not what was gathered."""
    calls = split.graph.calls.keys() - split.extent.calls
    assert len(calls) <= max(14, len(split.graph.calls) // 6), sorted(calls)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_on_parts_is_the_plain_network(name: str) -> None:
    make, shape = NETWORKS[name]
    grid = (2, 1, 2) if len(shape) == 5 else (2, 2)
    _assert_deep(assert_split_is_plain(make(), torch.randn(shape), grid=grid))


@pytest.mark.slow
@pytest.mark.parametrize("early", [(), None])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", EVERY)
def test_a_network_on_any_grid_is_the_plain_network(
    name: str, grid: tuple[int, ...], early: tuple[str, ...] | None
) -> None:
    make, shape = EVERY[name]
    _assert_deep(assert_split_is_plain(make(), torch.randn(shape), grid=grid, early=early))


class _Order:
    """What one rank does, in order: messages as they are posted and waited for, and calls as they begin."""

    def __init__(self, comm: Communicator, seen: list[str]) -> None:
        self.comm, self.rank, self.size, self.seen = comm, comm.rank, comm.size, seen

    def send(self, tensor: torch.Tensor, target: int, number: int) -> None:
        self.seen.append("send")
        self.comm.send(tensor, target, number)

    def receive(self, *where: object) -> object:
        coming = self.comm.receive(*where)  # type: ignore[arg-type]
        order = self

        class Waited:
            def wait(self) -> torch.Tensor:
                order.seen.append("wait")
                return coming.wait()

        return Waited()


@pytest.mark.parametrize("early", [(), None])
def test_the_own_part_is_computed_while_borders_travel(early: tuple[str, ...] | None) -> None:
    """Between the send and the wait lies the convolution of the own part, forward and backward."""
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)).double()
    x = torch.randn(1, 2, 16, 16, dtype=torch.float64)
    split = VirtualRanks(net, (x,), (1, 2), early=early)
    seen: list[str] = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if "convolution" in str(func) and args[0].shape[-1] >= 8:
                seen.append("convolve back" if "backward" in str(func) else "convolve")
            return made

    def one(comm: Communicator) -> None:
        watched = _Order(comm, seen) if comm.rank == 0 else comm
        with Watched() if comm.rank == 0 else contextlib.nullcontext():
            split._rank(watched, (x,), lambda out: out.square().mean())  # type: ignore[arg-type]

    run_on_threads(2, one)
    forward = ["send", "convolve", "wait"] if early is None else ["convolve", "send", "wait"]
    assert seen[:3] == forward
    gathered = seen.index("convolve back")  # of the second convolution, after the gradient was shared out
    backward = ["send", "convolve back", "wait"] if early is None else ["send", "wait", "convolve back"]
    assert seen[gathered + 1 : gathered + 4] == backward


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 1, 3)])
def test_a_volume_on_any_grid_is_the_plain_network(grid: tuple[int, ...]) -> None:
    make, shape = NETWORKS["unet3d"]
    assert_split_is_plain(make(), torch.randn(shape), grid=grid)


def test_halos_may_be_computed_twice_and_not_sent() -> None:
    make, shape = NETWORKS["unet"]
    net, x = make(), torch.randn(shape)
    sent = assert_split_is_plain(net, x, grid=(2, 2))
    net.zero_grad()
    every = tuple(sent.layout.exchanges)
    computed = assert_split_is_plain(make(), x, grid=(2, 2), twice=every)
    assert not computed.layout.exchanges and len(every) > 5
    assert sent.ranks is not None and computed.ranks is not None
    assert computed.ranks.messages < sent.ranks.messages


@pytest.mark.slow
def test_a_large_image_takes_a_quarter_on_four_ranks() -> None:
    """Of a U-Net at 4096 pixels, counted on tensors without memory."""
    image = torch.empty(1, 3, 4096, 4096, device="meta")
    model = UNet(3, 2, width=8)
    whole, quarter = (VirtualRanks(model, (image,), grid).layout for grid in ((1, 1), (2, 2)))
    first, alone = (bytes_of_ranks(layout, layout.network.graph.calls)[0].peak for layout in (quarter, whole))
    assert first < 0.27 * alone
