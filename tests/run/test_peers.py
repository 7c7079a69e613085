"""Against torch.distributed.pipelining where it can express the case, and on a network written by others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.run.peers import monai, monai_plain, pipelined
from tests.run.pool import Pool
from tests.run.test_gradients import compare
from tests.run.training import train


@pytest.mark.parametrize(("kind", "schedule"), [("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b")])
def test_torchs_pipelining_has_the_same_gradients(ranks: Pool, kind: str, schedule: str) -> None:
    theirs = ranks.run(pipelined, 2, kind, 4)
    ours = ranks.run(train, 2, "chain", {"stages": 2, "schedule": schedule, "micro_batches": 4}, 1)
    for rank in range(2):
        assert theirs[rank].keys() == ours[rank]["gradients"].keys()
        for name, gradient in theirs[rank].items():
            assert torch.allclose(ours[rank]["gradients"][name], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.parametrize(
    "plan",
    [
        {"stages": 2, "schedule": "model_parallel", "micro_batches": 2},
        {"stages": 2, "schedule": "gems", "batches": 4},
        {"stages": 2, "schedule": "1f1b", "micro_batches": 2, "replicas": 2},
        {"stages": 4, "schedule": "gpipe", "micro_batches": 4},
        {"stages": 4, "schedule": "gems", "batches": 2},
    ],
)
def test_monais_nested_unet(ranks: Pool, plan: dict[str, Any]) -> None:
    pieces = plan.get("micro_batches", 1) * plan.get("batches", 1) * plan.get("replicas", 1)
    count = plan["stages"] * plan.get("replicas", 1)
    compare(ranks.run(monai, count, plan, 5), monai_plain(pieces, 5))
