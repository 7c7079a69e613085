"""Against torch.distributed.pipelining where it can express the case."""

from __future__ import annotations

import pytest
import torch

from tests.run.peers import pipelined
from tests.run.pool import Pool
from tests.run.training import train


@pytest.mark.parametrize(("kind", "schedule"), [("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b")])
def test_torchs_pipelining_has_the_same_gradients(ranks: Pool, kind: str, schedule: str) -> None:
    theirs = ranks.run(pipelined, 2, kind, 4)
    ours = ranks.run(train, 2, "chain", {"stages": 2, "schedule": schedule, "micro_batches": 4}, 1)
    for rank in range(2):
        assert theirs[rank].keys() == ours[rank]["gradients"].keys()
        for name, gradient in theirs[rank].items():
            assert torch.allclose(ours[rank]["gradients"][name], gradient, rtol=1e-12, atol=1e-14)
