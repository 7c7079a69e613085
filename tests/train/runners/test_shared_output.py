"""Outputs that are sent to the first rank give the metrics of the outputs themselves."""

from __future__ import annotations

import json

import pytest
import torch

from outcore.train.metrics import Accuracy, Dice
from outcore.train.runners.shared_output import packed, unpacked


@pytest.mark.parametrize("shape", [(2, 3, 8, 9), (1, 3, 200, 150), (2, 1, 300, 250), (1, 2, 50, 50, 50), (4, 3)])
def test_what_arrives_has_the_same_classes(shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    output = torch.randn(shape, generator=random)
    targets = torch.randint(max(2, shape[1]), (shape[0], *shape[2:]), generator=random)
    arrived = unpacked(json.loads(json.dumps(packed(output, targets))))
    assert arrived.shape == output.shape
    for metric in (Accuracy, Dice):
        here, there = metric(), metric()
        here.add(output, targets)
        there.add(arrived, targets)
        assert here.value() == there.value()


def test_what_is_too_large_or_no_map_of_classes_stays() -> None:
    large = torch.zeros(1, 2, 300, 300)
    assert packed(large, torch.zeros(1, 300, 300)) is None  # values, not classes
    assert packed(torch.zeros(1, 300, 300, 2), None) is None
    assert packed(torch.zeros(1).expand(1, 2, 1 << 13, 1 << 12), torch.zeros(1).long()) is None
    assert packed({"out": large}, torch.zeros(1, 300, 300).long()) is None
