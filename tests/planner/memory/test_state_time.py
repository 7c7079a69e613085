"""What it takes to have parameters, gradients and optimizer state elsewhere: only what no computing hides."""

from __future__ import annotations

from typing import Any

import pytest

from outcore.cost.optimizer_cost import OptimizerCost
from outcore.planner.memory.buckets import OffloadableParam, OffloadableParams
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.state_policy import StatePolicy
from outcore.planner.memory.state_residency import _time_s

PARAMETERS = OffloadableParams((OffloadableParam("a", 600), OffloadableParam("b", 400, trained=False)), {}, {})
"""1,000 bytes, 600 of them trained."""
LINK = OffloadTarget(out_bytes_per_s=50.0, in_bytes_per_s=100.0)
"""All parameters come in 10 s and leave in 20 s."""


@pytest.mark.parametrize(
    ("policy", "forward_s", "backward_s", "time_s"),
    [
        ({}, 1, 1, 0.0),
        ({"optimizer": "offload"}, 1, 1, 2 * 600 / 50),  # Adam's state of what is trained, at the slower rate
        ({"parameters": "offload"}, 50, 50, 20.0),  # hidden by forward; the updated ones move at the slower rate
        ({"parameters": "offload"}, 4, 50, 6.0 + 20.0),
        ({"parameters": "offload", "stage_bytes": 1}, 50, 4, 20.0 + 6.0),  # backward has them come once more
        ({"parameters": "offload", "stage_bytes": 1}, 50, 50, 20.0),
        ({"parameters": "offload", "stage_bytes": 1, "gradients": "offload"}, 50, 4, 20.0 + 16.0 + 10.0),
        ({"parameters": "offload", "stage_bytes": 1, "gradients": "offload"}, 50, 50, 20.0 + 10.0),
        ({"parameters": "offload", "optimizer": "offload"}, 4, 50, 26.0 + 24.0),
    ],
)  # fmt: skip
def test_time_is_what_is_left_of_copies_beside_the_computing(
    policy: Any, forward_s: float, backward_s: float, time_s: float
) -> None:
    adam = OptimizerCost.of(2.0)
    assert _time_s(StatePolicy(**policy), PARAMETERS, adam, LINK, forward_s, backward_s) == pytest.approx(time_s)
