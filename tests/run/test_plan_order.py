"""Plans that carry an order of their own: the gradients of plain PyTorch, also for a last batch that is smaller."""

from __future__ import annotations

from typing import Any

import pytest

from outcore.program import Links, Stages
from outcore.program.list_scheduler import SchedulerSettings, list_schedule
from outcore.program.written_order import write_order
from tests.run.pool import Pool
from tests.run.test_gradients import compare
from tests.run.training import difference, plain, train
from tests.run.varying import ALONE, run


def ordered(inverted: bool, **more: Any) -> dict[str, Any]:
    """Two stages and four micro-batches, in an order that no schedule has."""
    setting = SchedulerSettings("longest way, in pace", 3, inverted)
    found = list_schedule(Stages.uniform(2), 4, setting, Links())
    assert found is not None
    numbers = {"schedule": "gems", "batches": 4} if inverted else {"schedule": "gpipe", "micro_batches": 4}
    return {"stages": 2, **numbers, "order": write_order(found), **more}


@pytest.mark.parametrize("inverted", [False, True])
def test_gradients_and_weights_are_those_of_plain_pytorch(ranks: Pool, inverted: bool) -> None:
    compare(ranks.run(train, 2, "unet", ordered(inverted), 2, 8), plain("unet", 4, 2, 8))


@pytest.mark.parametrize("inverted", [False, True])
def test_a_smaller_batch_runs_the_same_order_without_the_rest(ranks: Pool, inverted: bool) -> None:
    alone = run("unet", ALONE, (8, 3))
    for result in ranks.run(run, 2, "unet", ordered(inverted), (8, 3)):
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        assert difference(result["weights"], alone["weights"]) < 1e-9
