"""Plans with policies that the planner chose, on ranks: the numbers of plans without, within the limit."""

from __future__ import annotations

import contextlib

import pytest
import torch

import outcore
from outcore.errors import PlanError
from tests.run.networks import CASES
from tests.run.pool import Pool
from tests.run.training import two_steps


def test_what_the_planner_does_not_keep_changes_no_bit_and_fits(ranks: Pool) -> None:
    job = CASES["unet"].job
    with pytest.raises(PlanError, match=r"memory_bytes=\d+") as refused:
        outcore.plan(job, devices=2, batch=8, schedule="1f1b", memory=1000)
    least = int(str(refused.value).partition("memory_bytes=")[2].partition(")")[0])
    found = None
    for share in (1.0, 0.995, 0.99, 0.985, 0.98, 0.97):  # below what cuts alone can do
        with contextlib.suppress(PlanError):
            made = outcore.plan(job, devices=2, batch=8, schedule="1f1b", memory=int(share * least))
            found = found or ((int(share * least), made) if made.policy else None)
    assert found is not None
    limit, plan = found
    same_cut = {**plan.to_json(), "policy": {}}
    want, ours_ = (ranks.run(two_steps, 2, "unet", document) for document in (same_cut, plan.to_json()))
    assert plan.predicted is not None
    for plain, ours in zip(want, ours_, strict=True):
        assert ours["losses"] == plain["losses"]
        assert all(torch.equal(t, plain["weights"][n]) for n, t in ours["weights"].items())
        # A plan counts what is sent until it has arrived; between ranks of one host it is copied and free before.
        assert max(ours["peaks"]) <= limit < max(plain["peaks"]) * 1.3
    assert max(ours_[0]["peaks"]) < max(want[0]["peaks"])
