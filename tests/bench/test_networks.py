"""The suite's networks at full size are those of their papers; batches and losses fit them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore.bench import networks
from outcore.bench.families import FAMILIES, family
from tests.foreign.shim import define_torchvision_operators

ENCODER_LAYER = 4 * 768 * 768 + 4 * 768 + 2 * 4 * 768 * 768 + 4 * 768 + 768 + 4 * 768
TRANSLATOR = 6 * 3_152_384 + 6 * 4_204_032 + 2 * 1024
"""Layers of an encoder and of a decoder (Vaswani et al.) and a norm behind each of the two."""
GRU = 2 * 3 * (1312 * 800 + 800 * 800 + 2 * 800) + 2 * 2 * 3 * (1600 * 800 + 800 * 800 + 2 * 800)
PARAMETERS = {
    "image classification": 25_557_032,
    "translation": TRANSLATOR + 32_000 * 512 + 32_000 * 513,
    "speech recognition": GRU + 32 * 41 * 11 + 32 * 32 * 21 * 11 + 2 * 32 + 2 * 64 + 29 * 1601,
    "recommendation": (138_493 + 26_744) * 3 * 64 + 256 * 257 + 128 * 257 + 64 * 129 + 129,
    "reinforcement learning": 8_224 + 32_832 + 36_928 + 1_606_144 + 19 * 513,
    "adversarial network": 3_576_704 + 3 + 2_765_568 + 64 + 1,
    "language modelling": 12 * ENCODER_LAYER + (30_522 + 128) * 768 + 30_522 * 769,
}
OUTPUTS = {
    "image classification": (2, 1000),
    "object detection": (2, 6 * (20 * 20 + 10 * 10), 81 + 4),
    "translation": (2, 64, 32_000),
    "speech recognition": (2, 200, 29),
    "recommendation": (2,),
    "reinforcement learning": (2, 19),
    "adversarial network": (2, 1, 1, 1),
    "language modelling": (2, 128, 30_522),
}
SIZES = {"image": 64, "detection": 32, "translation": 64, "speech": 4, "recommendation": 65_536, "reinforcement": 256}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_network_at_full_size_has_the_parameters_and_outputs_of_its_paper(name: str) -> None:
    job = family(name)
    with torch.device("meta"):
        model = job.build()
        args, _, target = job.example(2)
        output = model(*args)
    parts = output if isinstance(output, tuple) else (output,)
    assert [tuple(part.shape) for part in parts] == [OUTPUTS[name]] * len(parts)
    assert len(target) == 2 and PARAMETERS.get(name, count(model)) == count(model)


def test_batches_of_the_suite_are_as_large_as_those_of_the_papers() -> None:
    assert {name: family(name).size for name in SIZES} == SIZES
    assert all(family(name, reduced=True).size < 257 for name in FAMILIES)


def test_resnet_50_computes_what_torchvisions_does() -> None:
    define_torchvision_operators()
    import torchvision

    ours, theirs = networks.ResNet().double().eval(), torchvision.models.resnet50().double().eval()
    for mine, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        mine.copy_(other)
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(ours(x), theirs(x), rtol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_targets_are_among_the_classes_and_another_batch_is_another(name: str) -> None:
    job = family(name, reduced=True)
    torch.manual_seed(0)
    (first, *_), _, target = job.example(3)
    (second, *_), _, _ = job.example(3)
    assert len(first) == len(target) == 3 and not torch.equal(first, second)
    if not target.is_floating_point():
        classes = job.build()(*job.example(3)[0]).shape[-1]
        assert target.min() >= 0 and target.max() < classes


def loss_of(name: str, output: Any, target: Tensor) -> float:
    loss = family(name, reduced=True).loss
    assert loss is not None
    return float(loss(output, target))


def test_losses_of_words_are_the_entropy_of_a_guess() -> None:
    for name in ("translation", "speech", "language"):
        assert loss_of(name, torch.zeros(2, 5, 7), torch.randint(7, (2, 5))) == pytest.approx(math.log(7))


def test_the_loss_of_a_detector_is_that_of_classes_and_boxes() -> None:
    output = torch.zeros(2, 3, 85)
    output[..., 81:] = 3.0
    expected = math.log(81) + (3.0 - 0.5)  # smooth L1 beyond 1
    assert loss_of("detection", output, torch.randint(81, (2, 3))) == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_an_actor_and_critic_is_gain_error_and_entropy() -> None:
    """Of one frame, with two actions of probabilities 3/4 and 1/4, worth 2 where 5 was reached."""
    output = torch.tensor([[math.log(3.0), 0.0, 2.0]])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    expected = -math.log(0.75) * 3 + 0.5 * 9 - 0.01 * entropy
    assert loss_of("reinforcement", output, torch.tensor([5.0])) == pytest.approx(expected)


def test_the_loss_of_adversaries_is_wassersteins() -> None:
    made, real = torch.tensor([1.0, 3.0]), torch.tensor([5.0, 6.0])
    assert loss_of("adversarial", (made, real), torch.zeros(2)) == pytest.approx(5.5 - 2.0)
