"""Networks drawn at random, of odd sizes and layouts, under every policy: the numbers of plain training bit for bit."""

from __future__ import annotations

import pytest
import torch

from .examine import examine
from .odd_networks import odd_network, odd_volume
from .odd_sequences import odd_sequence

KINDS = {"image": odd_network, "volume": odd_volume, "sequence": odd_sequence}
FORMS = {
    "image": ("fp32", "fp32 channels_last"),
    "volume": ("fp32", "fp32 channels_last"),
    "sequence": ("fp32", "bf16"),
}
"""bf16 convolutions only on a GPU: on a CPU, their gradients over images one pixel wide read memory nobody wrote."""
QUICK, MANY = range(12), range(12, 150)


@pytest.mark.parametrize(("kind", "precision"), [(kind, form) for kind, forms in FORMS.items() for form in forms])
@pytest.mark.parametrize("number", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in MANY)])
def test_odd_networks(number: int, kind: str, precision: str) -> None:
    _equal(kind, number, torch.device("cpu"), precision)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "fp32 channels_last", "bf16 channels_last"])
@pytest.mark.parametrize("number", range(20))
def test_odd_networks_on_a_gpu(number: int, precision: str, kind: str) -> None:
    _equal(kind, number, torch.device("cuda", 0), precision)


def _equal(kind: str, number: int, device: torch.device, precision: str) -> None:
    verdict = examine(KINDS[kind](number), device, precision)
    if verdict.outcome == "not trainable":
        pytest.skip(verdict.note)  # in plain PyTorch: written in place into what backward needs
    assert verdict.outcome in ("equal", "equal where plain repeats itself"), verdict
