"""Plans with policies that the planner chose, on ranks: the numbers of plans without, within the limit."""

from __future__ import annotations

import torch

import outcore
from tests.run.networks import CASES
from tests.run.pool import Pool
from tests.run.training import two_steps


def test_what_the_planner_does_not_keep_changes_no_bit_and_fits(ranks: Pool) -> None:
    job = CASES["unet"].job
    free = outcore.plan(job, devices=2, batch=8, schedule="1f1b", memory="1GiB")
    assert free.predicted is not None
    shares = (0.85, 0.8, 0.75, 0.7)
    limits = [int(share * max(free.predicted.peak_bytes)) for share in shares]
    plans = (outcore.plan(job, devices=2, batch=8, schedule="1f1b", memory=limit) for limit in limits)
    limit, plan = next((limit, made) for limit, made in zip(limits, plans, strict=True) if made.policy)
    same_cut = {**plan.to_json(), "policy": {}}
    want, found = (ranks.run(two_steps, 2, "unet", document) for document in (same_cut, plan.to_json()))
    assert plan.predicted is not None
    for plain, ours in zip(want, found, strict=True):
        assert ours["losses"] == plain["losses"]
        assert all(torch.equal(t, plain["weights"][n]) for n, t in ours["weights"].items())
        assert max(ours["peaks"]) <= limit < max(plain["peaks"]) * 1.2
    assert max(found[0]["peaks"]) < max(want[0]["peaks"])
