import pytest
import torch

from outcore.models import AlexNet


@pytest.mark.parametrize(("classes", "expected"), [(2, 57_012_034), (1000, 61_100_840)])
def test_parameters_match_the_known_counts(classes: int, expected: int) -> None:
    with torch.device("meta"):
        net = AlexNet(classes)
    assert sum(p.numel() for p in net.parameters()) == expected


@pytest.mark.parametrize("size", [(63, 63), (64, 101), (512, 224)])
def test_any_image_from_63_pixels_gives_two_scores(size: tuple[int, int]) -> None:
    with torch.device("meta"):
        assert AlexNet()(torch.empty(2, 3, *size)).shape == (2, 2)


def test_the_linear_layers_hold_nearly_all_parameters() -> None:
    with torch.device("meta"):
        net = AlexNet()
    linear = sum(p.numel() for p in net.classifier.parameters())
    assert linear / sum(p.numel() for p in net.parameters()) > 0.95
