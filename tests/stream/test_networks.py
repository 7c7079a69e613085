"""Networks as people use them, streamed against plain: outputs, every gradient, every buffer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from tests.foreign.shim import define_torchvision_operators

from .oracle import assert_equal_to_plain, with_statistics

define_torchvision_operators()

slow, foreign = pytest.mark.slow, pytest.mark.foreign


def torchvision(name: str, **options) -> nn.Module:
    import torchvision

    family = torchvision.models.video if name == "r3d_18" else torchvision.models
    return with_statistics(getattr(family, name)(num_classes=5, **options)).eval()


def monai(name: str, *args, **options) -> nn.Module:
    import monai.networks.nets

    return with_statistics(getattr(monai.networks.nets, name)(*args, **options))


CLASSIFIERS = [
    pytest.param("resnet18", {}, (2, 3, 97, 65), 40, {}, id="resnet18"),
    pytest.param("resnet18", {}, (1, 3, 97, 65), 40, {"boundary": "layer2"}, id="resnet18 to layer2"),
    pytest.param("resnet18", {}, (1, 3, 65, 97), 40, {"fold": False, "boundary": "layer1"}, id="resnet18 not folded"),
    pytest.param("resnet34", {}, (1, 3, 97, 65), 40, {}, id="resnet34", marks=slow),
    pytest.param("resnet50", {}, (1, 3, 97, 65), 40, {}, id="resnet50", marks=slow),
    pytest.param("vgg19", {}, (1, 3, 97, 65), 40, {}, id="vgg19", marks=slow),
    pytest.param("convnext_tiny", {}, (1, 3, 97, 65), 40, {}, id="convnext", marks=slow),
    pytest.param("efficientnet_b0", {}, (1, 3, 97, 65), 64, {"statistics": True}, id="efficientnet", marks=slow),
    pytest.param(
        "inception_v3",
        {"aux_logits": False, "init_weights": False},
        (1, 3, 107, 95),
        60,
        {},
        id="inception",
        marks=slow,
    ),
    pytest.param("densenet121", {}, (1, 3, 97, 65), 60, {}, id="densenet", marks=slow),
    pytest.param("shufflenet_v2_x0_5", {}, (1, 3, 97, 65), 60, {}, id="shufflenet"),
    pytest.param("r3d_18", {}, (1, 3, 7, 33, 25), 20, {}, id="3-D ResNet", marks=slow),
]


@foreign
@pytest.mark.parametrize(("name", "options", "shape", "tile", "how"), CLASSIFIERS)
def test_classifiers(name, options, shape, tile, how) -> None:
    streamed = assert_equal_to_plain(torchvision(name, **options), torch.randn(shape), tile=tile, **how)
    assert streamed.counts.forward > 1


SEGMENTERS = [
    pytest.param(
        lambda: monai("UNet", 2, 1, 2, (4, 8, 16), (2, 2), num_res_units=2, norm="batch").eval(), (52, 44), 20
    ),
    pytest.param(lambda: monai("UNet", 2, 1, 2, (4, 8, 16), (2, 2), num_res_units=2), (52, 44), 26),
    pytest.param(lambda: monai("SegResNet", 2, 8, 1, 2), (48, 40), 24, marks=slow),
    pytest.param(lambda: monai("DynUNet", 2, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2]), (32, 24), 16),
    pytest.param(lambda: monai("DynUNet", 3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2]), (16, 12, 20), 10, marks=slow),
    pytest.param(lambda: monai("UNet", 3, 1, 2, (4, 8, 16), (2, 2), norm="batch").eval(), (20, 16, 24), 12),
]


@foreign
@pytest.mark.parametrize(("build", "size", "tile"), SEGMENTERS)
def test_segmenters_with_skips_and_norms_over_the_image(build, size, tile) -> None:
    assert_equal_to_plain(build(), torch.randn(1, 1, *size), tile=tile, statistics=True)


@foreign
@slow
def test_hovernet_with_valid_convolutions_and_crops() -> None:
    assert_equal_to_plain(monai("HoVerNet", mode="fast", out_classes=3).eval(), torch.randn(1, 3, 256, 256), tile=160)


@slow
@pytest.mark.parametrize("training", [False, True])
def test_our_unet_of_odd_size(training: bool) -> None:
    net = with_statistics(outcore.models.UNet()).train(training)
    assert_equal_to_plain(net, torch.randn(1, 3, 53, 39), tile=27, statistics=training)


@foreign
@slow
def test_a_resnet_in_train_mode_moves_its_running_statistics_once() -> None:
    net = torchvision("resnet18").train()
    assert_equal_to_plain(net, torch.randn(2, 3, 65, 49), tile=33, statistics=True)


class Mixed(nn.Module):
    """Odd paddings, dilations, skips of several scales, an upsampling and two outputs."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, (5, 4), stride=(2, 1), padding=(1, 2), bias=False)
        self.norm = norm(8)
        self.wide = nn.Conv2d(8, 8, 3, dilation=3, padding=3, padding_mode="reflect", groups=4)
        self.pool = nn.MaxPool2d(3, 2, 1, ceil_mode=True)
        self.up = nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1)
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        x = F.gelu(self.norm(self.stem(x)))
        skip = x
        x = self.pool(self.wide(x) + x[:, :, :, :])
        small = x.softmax(1)
        x = F.interpolate(self.up(small), skip.shape[2:], mode="bilinear", align_corners=False)
        return self.head(torch.cat([x, skip], 1)), small


@pytest.mark.parametrize("tile", [7, 16, (40, 9), 1000])
def test_any_tile_size_gives_the_same(tile) -> None:
    assert_equal_to_plain(with_statistics(Mixed()).eval(), torch.randn(2, 3, 41, 37), tile=tile)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d, lambda c: nn.GroupNorm(4, c)])
@pytest.mark.parametrize("keep", [(), ("stem#0:out",)])
def test_norms_over_the_image_by_barriers(norm, keep) -> None:
    net = Mixed(norm).train()
    streamed = assert_equal_to_plain(net, torch.randn(2, 3, 31, 37), tile=12, statistics=True, keep=keep)
    assert len(streamed.prepare(torch.empty(2, 3, 31, 37, dtype=torch.float64, device="meta")).streaming.stages) == 2


def test_without_leave_to_pass_again_streaming_stops_at_the_norm_and_says_so() -> None:
    streamed = assert_equal_to_plain(Mixed().train(), torch.randn(2, 3, 31, 37), tile=12)
    streaming = streamed.prepare(torch.empty(2, 3, 31, 37, dtype=torch.float64, device="meta")).streaming
    assert [block for block, _ in streaming.stopped] == ["norm"]
    assert "statistics=True" in streaming.stopped[0][1]
    assert streaming.boundary == ("stem#0:out",)


@pytest.mark.parametrize("boundary", ["0", "1", "2"])
def test_a_boundary_inside_of_what_was_folded_moves_behind_it(boundary: str) -> None:
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.GELU())
    streamed = assert_equal_to_plain(
        with_statistics(nn.Sequential(*layers)).eval(), torch.randn(1, 3, 30, 26), tile=9, boundary=boundary
    )
    shape = torch.empty(1, 3, 30, 26, dtype=torch.float64, device="meta")
    assert streamed.prepare(shape).streaming.boundary == ("2#0:out",)


class Attention(nn.Module):
    """Features, then attention over all places as in multiple-instance learning."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.Conv2d(6, 6, 3, 2, 1), nn.ReLU())
        self.weigh = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
        self.classify = nn.Linear(6, 2)

    def forward(self, x):
        places = self.features(x).flatten(2).transpose(1, 2)
        weight = self.weigh(places).softmax(1)
        return self.classify((weight * places).sum(1))


def test_attention_over_all_places_runs_on_the_boundary_map() -> None:
    streamed = assert_equal_to_plain(Attention(), torch.randn(2, 3, 45, 38), tile=16)
    shape = torch.empty(2, 3, 45, 38, dtype=torch.float64, device="meta")
    assert streamed.prepare(shape).streaming.boundary == ("features.3#0:out",)


@pytest.mark.parametrize("pool", [nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1), nn.AdaptiveAvgPool2d(3)])
def test_pools_at_the_end(pool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.GELU(), pool, nn.Flatten(), nn.LazyLinear(2))
    net(torch.randn(1, 3, 30, 41))
    assert_equal_to_plain(net, torch.randn(2, 3, 30, 41), tile=11)


def test_squeeze_and_excite_inside() -> None:
    class Excite(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 6, 3, 2), nn.Conv2d(6, 6, 3)
            self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 6, 1), nn.Sigmoid())

        def forward(self, x):
            x = self.conv(x)
            return self.last(x * self.squeeze(x)).mean((2, 3))

    assert_equal_to_plain(Excite(), torch.randn(2, 3, 33, 29), tile=9, statistics=True)
    assert_equal_to_plain(Excite(), torch.randn(2, 3, 33, 29), tile=9)


def test_two_magnifications_of_one_image() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine, self.coarse = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(3, 4, 3, 1, 1)

        def forward(self, fine, coarse):
            return (self.fine(fine) + self.coarse(coarse)).mean((2, 3))

    assert_equal_to_plain(Two(), torch.randn(1, 3, 40, 32), torch.randn(1, 3, 20, 16), tile=12)


def test_a_parameter_used_before_and_after_the_boundary() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            x = self.conv(x).relu_()
            return self.conv(F.adaptive_avg_pool2d(x, 4)).flatten(1).cumsum(1)

    assert_equal_to_plain(Shared(), torch.randn(2, 3, 19, 23), tile=8)


def test_unpooling_by_positions_is_streamed() -> None:
    net = with_statistics(outcore.models.ReLayNet(1, 3, width=4))
    x = torch.randn(1, 1, 48, 40)
    streamed = assert_equal_to_plain(net.eval(), x, tile=16)
    assert not streamed.prepare(x.double()).streaming.stopped


class MeanOfRows(nn.Module):
    """A reduction over one of two pixel dimensions, which is neither local nor global."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x):
        return self.conv(x).mean(-1)


def test_a_mean_over_one_of_two_dimensions_is_not_streamed() -> None:
    assert_equal_to_plain(MeanOfRows(), torch.randn(1, 2, 24, 20), tile=8)
