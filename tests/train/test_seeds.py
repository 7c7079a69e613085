"""A run's seed is that of everything a job may draw from."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from outcore.train.application import _seed


def drawn(seed: int) -> tuple[float, float, float]:
    config: Any = SimpleNamespace(train=SimpleNamespace(seed=seed, deterministic=False))
    _seed(config)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_python_numpy_and_torch_draw_the_same_again() -> None:
    first, other, again = drawn(5), drawn(6), drawn(5)
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))
    drawn(2**40)  # more than NumPy takes
