"""Names and fingerprints are the same on every supported torch version and machine.

`fingerprints.json` was written under torch 2.13; the same file must hold under 2.11. To add a network, run this file as
a script.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import outcore
from outcore import models

EXPECTED = Path(__file__).parent / "fingerprints.json"

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "AmoebaNetD": (lambda: models.AmoebaNetD(cells=6, filters=16), (1, 3, 64, 64)),
    "BasicCNN": (models.BasicCNN, (1, 1, 28, 28)),
    "LeNet": (models.LeNet, (1, 3, 32, 32)),
    "LSTM": (lambda: nn.LSTM(4, 4, 2), (3, 2, 4)),
    "Net2": (lambda: models.Net2(features=6 * 16 * 16), (1, 3, 16, 16)),
    "ReLayNet": (lambda: models.ReLayNet(width=8), (1, 1, 32, 32)),
    "ResNet110V2": (models.ResNet110V2, (1, 3, 32, 32)),
    "Transformer": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2), (5, 2, 8)),
    "UNet": (lambda: models.UNet(width=4, depth=2), (1, 3, 33, 35)),
    "UNet3d": (lambda: models.UNet(width=4, depth=2, dims=3), (1, 3, 16, 16, 16)),
}


def fingerprint(name: str) -> str:
    build, shape = NETWORKS[name]
    with torch.device("meta"):
        model = build()
    return outcore.capture(model, [shape]).fingerprint


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", NETWORKS)
def test_fingerprint_is_the_recorded_one(name: str) -> None:
    assert fingerprint(name) == json.loads(EXPECTED.read_text())[name]


if __name__ == "__main__":
    EXPECTED.write_text(json.dumps({name: fingerprint(name) for name in NETWORKS}, indent=1) + "\n")
