"""What holds for all networks: shapes in train and eval, gradients, state, and building without memory."""

import copy
import doctest
import importlib
import pkgutil
from collections.abc import Callable

import pytest
import torch
from torch import nn

from outcore import models

Case = tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]

CASES: dict[str, Case] = {
    "AmoebaNetD": (lambda: models.AmoebaNetD(5, cells=3, filters=32), (2, 3, 65, 71), (2, 5)),
    "ResNet110V2": (lambda: models.ResNet110V2(5, depth=20), (2, 3, 21, 18), (2, 5)),
    "UNet": (lambda: models.UNet(width=4, depth=3), (2, 3, 21, 18), (2, 2, 21, 18)),
    "UNet-3d": (
        lambda: models.UNet(1, 2, width=4, depth=2, dims=3),
        (2, 1, 9, 10, 11),
        (2, 2, 9, 10, 11),
    ),
    "SlideNet": (lambda: models.SlideNet(5, width=4), (2, 3, 37, 50), (2, 5)),
    "ReLayNet": (lambda: models.ReLayNet(width=6), (2, 1, 24, 16), (2, 10, 24, 16)),
    "CosmoFlow": (lambda: models.CosmoFlow(side=33, width=2), (2, 4, 33, 33, 33), (2, 4)),
    "LeNet": (models.LeNet, (2, 3, 32, 32), (2, 10)),
    "BasicCNN": (models.BasicCNN, (2, 1, 28, 28), (2, 10)),
    "Net2": (lambda: models.Net2(features=6 * 9 * 11), (2, 3, 9, 11), (2, 120)),
    "TwelveConvs": (models.TwelveConvs, (2, 3, 9, 11), (2, 10)),
}
LARGE: dict[str, Case] = {
    "AmoebaNetD": (models.AmoebaNetD, (2, 3, 1001, 767), (2, 10)),
    "ResNet110V2": (models.ResNet110V2, (2, 3, 1001, 767), (2, 10)),
    "UNet": (models.UNet, (1, 3, 1001, 767), (1, 2, 1001, 767)),
    "UNet-3d": (lambda: models.UNet(dims=3), (1, 3, 65, 66, 67), (1, 2, 65, 66, 67)),
    "ReLayNet": (models.ReLayNet, (1, 1, 512, 64), (1, 10, 512, 64)),
    "VGG19": (models.VGG19, (2, 3, 233, 197), (2, 2)),
    "AlexNet": (models.AlexNet, (2, 3, 233, 197), (2, 2)),
    "CosmoFlow": (models.CosmoFlow, (1, 4, 128, 128, 128), (1, 4)),
    "Net2": (models.Net2, (1, 3, 762, 508), (1, 120)),
}
NEVER_CALLED = {"Net2": {"fc2.weight", "fc2.bias"}}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CASES)
def test_output_has_the_expected_shape_and_is_finite(name: str, training: bool) -> None:
    make, shape, expected = CASES[name]
    torch.manual_seed(0)
    out = make().train(training)(torch.randn(shape))
    assert tuple(out.shape) == expected
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", LARGE)
def test_default_network_runs_and_differentiates_without_memory(name: str) -> None:
    make, shape, expected = LARGE[name]
    with torch.device("meta"):
        net = make()
        out = net(torch.empty(shape))
    assert tuple(out.shape) == expected
    out.sum().backward()
    without = {n for n, p in net.named_parameters() if p.grad is None}
    assert without == NEVER_CALLED.get(name, set())


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_that_takes_part_gets_a_gradient(name: str) -> None:
    make, shape, _ = CASES[name]
    torch.manual_seed(0)
    # In eval mode, because batch statistics cancel the bias of the convolution before them.
    net = make().double().eval()
    net(torch.randn(shape, dtype=torch.float64)).square().sum().backward()
    without = {n for n, p in net.named_parameters() if p.grad is None or not p.grad.any()}
    assert without == NEVER_CALLED.get(name, set())


@pytest.mark.parametrize("name", CASES)
def test_state_and_copies_give_the_same_output(name: str) -> None:
    make, shape, _ = CASES[name]
    torch.manual_seed(0)
    net, other = make().eval(), make().eval()
    other.load_state_dict(net.state_dict())
    x = torch.randn(shape)
    expected = net(x)
    assert torch.equal(other(x), expected)
    assert torch.equal(copy.deepcopy(net)(x), expected)


@pytest.mark.parametrize("module", [info.name for info in pkgutil.iter_modules(models.__path__)])
def test_examples_in_the_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"outcore.models.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_every_public_name_is_a_network() -> None:
    assert all(issubclass(getattr(models, name), nn.Module) for name in models.__all__)
