import pytest
import torch
from torch import nn

from outcore.models import VGG19


@pytest.mark.parametrize(("classes", "expected"), [(2, 139_578_434), (1000, 143_667_240)])
def test_parameters_match_the_known_counts(classes: int, expected: int) -> None:
    with torch.device("meta"):
        net = VGG19(classes)
    assert sum(p.numel() for p in net.parameters()) == expected


def test_nineteen_layers_have_parameters() -> None:
    with torch.device("meta"):
        net = VGG19()
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in net.modules()) == 19


@pytest.mark.parametrize("size", [(32, 32), (33, 95), (512, 224)])
def test_any_image_from_32_pixels_gives_two_scores(size: tuple[int, int]) -> None:
    with torch.device("meta"):
        assert VGG19()(torch.empty(2, 3, *size)).shape == (2, 2)
