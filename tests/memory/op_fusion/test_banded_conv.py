"""Convolutions of images that are too large to count, in bands of rows: the output and gradients of one kernel."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.memory.op_fusion import banded_conv
from outcore.memory.op_fusion.banded_conv import _Banded


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is too large, on a CPU."""
    for name, value in (("_COUNTED", 2000), ("_BAND", 600), ("_DEVICES", ("cpu", "cuda"))):
        monkeypatch.setattr(banded_conv, name, value)
    yield


CONVOLUTIONS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((3, 8, 7), {"stride": 2, "padding": 3}),
    ((4, 8, 1), {}),
    ((4, 8, 1), {"stride": 2}),
    ((4, 4, 3), {"stride": 2, "padding": 1, "bias": False}),
    ((4, 6, 3), {"padding": (0, 2), "dilation": (3, 1), "groups": 2}),
    ((4, 4, 2), {"stride": (3, 1), "padding": (1, 0)}),
    ((4, 4, 3), {"padding": 4}),
]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("sizes, settings", CONVOLUTIONS)
def test_output_and_gradients_are_those_of_one_convolution(
    sizes: tuple[int, int, int], settings: dict[str, Any], form: torch.memory_format
) -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(*sizes, **settings).double()
    given = torch.randn(2, sizes[0], 29, 31, dtype=torch.float64).contiguous(memory_format=form)
    found = []
    for run in (module, _Banded(module)):
        module.zero_grad()
        x = given.clone().requires_grad_()
        out = run(x)
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        found.append((out.detach(), x.grad, *(p.grad for p in module.parameters())))
    assert found[1][0].stride() == found[0][0].stride()
    for ours, plain in zip(found[1], found[0], strict=True):
        assert torch.allclose(ours, plain, rtol=1e-12, atol=1e-12)


def test_bands_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    own = F.conv2d

    def conv2d(x: torch.Tensor, *args: Any) -> torch.Tensor:
        out = own(x, *args)
        seen.append(max(x.numel(), out.numel()))
        return out

    monkeypatch.setattr(F, "conv2d", conv2d)
    _Banded(nn.Conv2d(2, 2, 3, padding=1))(torch.randn(1, 2, 60, 60))
    assert len(seen) > 10 and max(seen) <= 600 + 2 * 2 * 60  # and the rows that two bands share


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).double()


def replaced(model: nn.Module) -> set[str]:
    """Calls that run as something else."""
    (entry,) = model.__dict__["forward"].admitted.values()
    return set(entry.compiled.instead) if entry.compiled is not None else set()


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_model_within_a_budget_computes_large_ones_in_bands(policy: str) -> None:
    model, plain = network(), network()
    images = torch.randn(1, 3, 20, 20, dtype=torch.float64)
    plan = dict.fromkeys(("0#0:out", "3#0:out"), policy)
    options: dict[str, Any] = {"optimizer": 0.0, "quiet": True, "plan": plan, "exact": "reassociated"}
    outcore.within(model, (images,), memory="1GiB", **options)
    assert {"0#0", "3#0"} <= replaced(model) and "5#0" not in replaced(model)
    for net in (model, plain):
        net(images).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_bit_for_bit_means_the_library_s_own_kernels() -> None:
    model = network()
    images = torch.randn(1, 3, 20, 20, dtype=torch.float64)
    outcore.within(model, (images,), memory="1GiB", optimizer=0.0, quiet=True, plan={"0#0:out": "recompute"})
    assert not replaced(model)
