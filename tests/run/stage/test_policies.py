"""The plan's policies for values inside stages: the same bits, less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import outcore
from tests.run.networks import CASES
from tests.run.pool import Pool
from tests.run.training import fingerprint, two_steps


def held(case: str, cut: int, policy: dict[str, str], placement: Any = None, schedule: str = "gpipe") -> dict[str, Any]:
    """Train two steps under policies; losses, weights, and the peak of the second."""
    plan = outcore.Plan(
        fingerprint(case),
        CASES[case].cuts[cut],
        schedule=schedule,  # type: ignore[arg-type]
        micro_batches=4,
        placement=placement,
        policy=policy,
    )
    return two_steps(case, plan.to_json())


def policy_of(case: str, how: str) -> dict[str, str]:
    """Every value that the graph lets one treat so."""
    from outcore.cost.buffers import buffers_of
    from outcore.cost.measured.saved_bytes import account

    graph = CASES[case].job.capture()
    found = buffers_of(graph, account(graph))
    return {
        name: how
        for name, buffer in found.items()
        if buffer.kind == "value" and buffer.savers and (how == "offload" or not buffer.obstacle)
    }


@pytest.mark.parametrize("how", ["recompute", "offload"])
@pytest.mark.parametrize("case", ["unet", "resnet"])
def test_policies_inside_stages_change_no_bit(ranks: Pool, case: str, how: str) -> None:
    policy = policy_of(case, how)
    assert policy
    plain = held(case, 2, {}, (0, 0))
    alone = held(case, 2, policy, (0, 0))
    assert alone["losses"] == plain["losses"]
    assert all(torch.equal(t, plain["weights"][n]) for n, t in alone["weights"].items())
    assert alone["peaks"][0] < plain["peaks"][0]
    for result in ranks.run(held, 2, case, 2, policy, None, "1f1b"):
        assert result["losses"] == plain["losses"]
        assert all(torch.equal(t, plain["weights"][n]) for n, t in result["weights"].items())
