"""Ranks that share an image, in real processes: gradients, losses, weights and buffers of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.run.pool import Pool
from tests.run.test_gradients import compare
from tests.run.training import plain, train


def _run(ranks: Pool, case: str, size: int, plan: dict[str, Any], pieces: int = 1, steps: int = 3) -> None:
    compare(ranks.run(train, size, case, plan, steps), plain(case, pieces, steps))


def test_two_ranks_share_an_image(ranks: Pool) -> None:
    plan = {"stages": 1, "spatial": {"grid": [1, 2]}, "exactness": "reassociated"}
    _run(ranks, "unet-bn", 2, plan, steps=20)
