from itertools import pairwise

import pytest
import torch

from outcore.models import CosmoFlow


@pytest.mark.parametrize(("side", "features"), [(32, 512), (128, 512 * 4**3), (512, 512 * 16**3)])
def test_first_dense_layer_fits_the_side(side: int, features: int) -> None:
    with torch.device("meta"):
        net = CosmoFlow(side=side)
        assert net.get_parameter("dense.0.weight").shape == (128, features)
        assert net(torch.empty(1, 4, side, side, side)).shape == (1, 4)


def test_parameters_match_the_closed_form() -> None:
    widths = [3, 2, 4, 8, 16, 32]
    expected = sum(27 * a * b + b for a, b in pairwise(widths))
    expected += (32 * 8 + 1) * 128 + (128 + 1) * 64 + (64 + 1) * 5
    net = CosmoFlow(side=64, outputs=5, channels=3, width=2)
    assert sum(p.numel() for p in net.parameters()) == expected


def test_outputs_stay_within_the_scaled_range() -> None:
    torch.manual_seed(0)
    out = CosmoFlow(side=32, width=2).eval()(1e4 * torch.randn(4, 4, 32, 32, 32))
    assert out.abs().max() <= 1.2


def test_volume_of_another_side_is_refused_with_the_network_that_fits() -> None:
    with pytest.raises(ValueError, match=r"48x48x48 voxels .* for 32 a side: .* CosmoFlow\(side=48\)"):
        CosmoFlow(side=32, width=2)(torch.randn(1, 4, 48, 48, 48))


def test_too_small_a_side_is_refused() -> None:
    with pytest.raises(ValueError, match="side=31 cannot be halved 5 times: give at least side=32"):
        CosmoFlow(side=31)
