from itertools import pairwise

import pytest
import torch

from outcore.models import UNet


def test_default_network_has_the_known_number_of_parameters() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in UNet().parameters()) == 31_037_698


@pytest.mark.parametrize("dims", [2, 3])
def test_parameters_match_the_closed_form(dims: int) -> None:
    channels, classes, width, depth = 1, 5, 6, 3

    def convolutions(inputs: int, outputs: int) -> int:
        return 3**dims * outputs * (inputs + outputs) + 2 * 2 * outputs

    widths = [width * 2**level for level in range(depth + 1)]
    expected = convolutions(channels, width) + width * classes + classes
    for above, below in pairwise(widths):
        expected += convolutions(above, below) + (2**dims * below * above + above) + convolutions(below, above)
    net = UNet(channels, classes, width=width, depth=depth, dims=dims)
    assert sum(p.numel() for p in net.parameters()) == expected


def test_levels_are_the_blocks_of_the_network() -> None:
    with torch.device("meta"):
        names = [name for name, _ in UNet(depth=3).named_children()]
    assert names == [
        "encoder1",
        "encoder2",
        "encoder3",
        "bottom",
        "decoder3",
        "decoder2",
        "decoder1",
        "head",
    ]


@pytest.mark.parametrize("size", [(8, 8), (9, 15), (17, 8), (23, 31)])
def test_images_of_any_size_keep_their_size(size: tuple[int, int]) -> None:
    assert UNet(width=2, depth=3)(torch.randn(2, 3, *size)).shape == (2, 2, *size)


@pytest.mark.parametrize("size", [(4, 4, 4), (5, 6, 7), (7, 9, 4)])
def test_volumes_of_any_size_keep_their_size(size: tuple[int, int, int]) -> None:
    assert UNet(1, 3, width=2, depth=2, dims=3)(torch.randn(2, 1, *size)).shape == (2, 3, *size)


@pytest.mark.parametrize(("dims", "odd", "full", "border"), [(2, (61, 59), 64, 28), (3, (19, 21, 23), 24, 12)])
def test_odd_sizes_leave_every_pixel_in_its_place(dims: int, odd: tuple[int, ...], full: int, border: int) -> None:
    # Away from the far border, further than the network sees, a crop must give what the whole gives: padding
    # anywhere else would shift it.
    torch.manual_seed(0)
    net = UNet(1, 2, width=3, depth=2 if dims == 2 else 1, dims=dims).double().eval()
    whole = torch.randn(1, 1, *[full] * dims, dtype=torch.float64)
    crop = whole[(..., *[slice(size) for size in odd])]
    inside = (..., *[slice(size - border) for size in odd])
    torch.testing.assert_close(net(crop)[inside], net(whole)[inside], rtol=0, atol=1e-12)


def test_too_small_an_image_is_refused_with_the_smallest_size() -> None:
    with pytest.raises(ValueError, match="15x40 pixels cannot be halved 4 times: give at least 16 pixels"):
        UNet(width=2)(torch.randn(1, 3, 15, 40))


@pytest.mark.parametrize(("arguments", "message"), [({"dims": 1}, "dims=1 .* dims=2"), ({"depth": 0}, "depth=0")])
def test_impossible_arguments_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UNet(**arguments)
