"""Networks written by others under every schedule: gradients and weights of plain PyTorch, as planned cuts run them."""

from __future__ import annotations

import pytest

from tests.run.library import CHAOTIC, NAMES, library_oracle, train_library
from tests.run.pool import Pool
from tests.run.test_gradients import SCHEDULES, compare

pytestmark = [pytest.mark.foreign, pytest.mark.slow]


def _run(ranks: Pool, name: str, stages: int, schedule: str, replicas: int, steps: int) -> None:
    plan = SCHEDULES[schedule] | {"stages": stages, "replicas": replicas}
    pieces = plan.get("micro_batches", 1) * plan.get("batches", 1) * replicas
    size = 2 * pieces  # batch normalisation needs two samples
    got = ranks.run(train_library, stages * replicas, name, plan, steps, size)
    compare(got, library_oracle(name, pieces, steps, size))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", NAMES)
def test_every_network_under_every_schedule(ranks: Pool, name: str, schedule: str) -> None:
    """Alone and with two replicas, weights after twenty steps."""
    most = 3 if name in CHAOTIC else 20
    for stages, replicas in ((2, 1), (3, 1), (4, 1), (2, 2)):
        _run(ranks, name, stages, schedule, replicas, most if (stages, replicas) == (2, 1) else min(most, 4))
