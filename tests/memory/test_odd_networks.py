"""Networks drawn at random, of odd sizes and layouts, under every policy: the numbers of plain training bit for bit."""

from __future__ import annotations

import pytest
import torch

from .examine import examine
from .odd_networks import odd_network

# bf16 only on a GPU: on a CPU, gradients of bf16 convolutions over images one pixel wide read memory nobody wrote.
PRECISIONS = ("fp32", "fp32 channels_last")
QUICK, MANY = range(30), range(30, 200)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("number", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in MANY)])
def test_odd_networks(number: int, precision: str) -> None:
    _equal(number, torch.device("cpu"), precision)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", [*PRECISIONS, "bf16 channels_last"])
@pytest.mark.parametrize("number", range(40))
def test_odd_networks_on_a_gpu(number: int, precision: str) -> None:
    _equal(number, torch.device("cuda", 0), precision)


def _equal(number: int, device: torch.device, precision: str) -> None:
    verdict = examine(odd_network(number), device, precision)
    if verdict.outcome == "not trainable":
        pytest.skip(verdict.note)  # in plain PyTorch: written in place into what backward needs
    assert verdict.outcome in ("equal", "equal where plain repeats itself"), verdict
