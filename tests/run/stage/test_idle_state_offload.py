"""The idle stage of GEMS outside the device: the same numbers, less memory, checkpoints as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.run import Engine
from tests.run.pool import Pool
from tests.run.resuming import make
from tests.run.training import batches_of

WIDTH = 96


class Wide(nn.Module):
    """Much weight, little else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _job(width: int) -> outcore.Job:
    return outcore.Job(
        model=lambda: Wide(width),
        batch=lambda n: (torch.randn(n, width), torch.randn(n, width)),
        loss=F.mse_loss,
        size=4,
        name="wide",
    )


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def peaks(
    offload: bool, width: int = WIDTH, device: str = "cpu"
) -> tuple[list[float], list[int], dict[str, torch.Tensor]]:
    """Losses, the peak of every rank and the weights after three steps."""
    job = _job(width)
    stages = (("layers.0", "layers.1"), ("layers.2", "layers.3"))
    plan = outcore.Plan(job.capture().fingerprint, stages, schedule="gems", batches=4)
    engine = Engine(job, plan, optimizer=_adam, offload_idle=offload, device=device)
    engine.count_memory()
    torch.manual_seed(3)
    losses = [engine.step(*job.batch(4)) for _ in range(3)]
    found = losses, list(engine.timeline().peak_bytes), engine.state_dict()
    engine.close()
    return found


def test_the_idle_stage_takes_no_memory(ranks: Pool) -> None:
    """Of weights, gradients and two moments, those of one stage are here at a time."""
    kept, parked = ranks.run(peaks, 2, False), ranks.run(peaks, 2, True)
    stage = 2 * (WIDTH + 1) * WIDTH * 4
    for (losses, before, weights), (same, after, others) in zip(kept, parked, strict=True):
        assert losses == same and all(torch.equal(t, others[n]) for n, t in weights.items())
        for rank in range(2):
            assert before[rank] > 8 * stage
            assert after[rank] < before[rank] - 3.9 * stage


def go(case: str, plan: dict[str, Any], offload: bool, path: str = "", **options: Any) -> dict[str, Any]:
    engine = make(case, plan, offload_idle=offload, **options)
    batches = batches_of(case, 5, 8)
    losses = [engine.step(*batch) for batch in batches[:3]]
    if path:
        engine.save(path)
        engine.close()
        engine = make(case, plan, offload_idle=not offload, **options)
        engine.load(path)
    losses += [engine.step(*batch) for batch in batches[3:]]
    answer = {"losses": losses, "evaluated": engine.evaluate(*batches[0]), "weights": engine.state_dict()}
    engine.close()
    return answer


@pytest.mark.parametrize(
    ("case", "stages", "options"),
    [
        ("unet", 2, {}),
        pytest.param("resnet", 3, {"accumulate": 2}, marks=pytest.mark.slow),
        pytest.param("transformer", 4, {"clip_norm": 0.1}, marks=pytest.mark.slow),
    ],
)
def test_nothing_else_changes(ranks: Pool, tmp_path: Path, case: str, stages: int, options: dict[str, Any]) -> None:
    plan = {"stages": stages, "schedule": "gems", "batches": 4}
    kept = ranks.run(go, stages, case, plan, False, **options)
    parked = ranks.run(go, stages, case, plan, True, str(tmp_path) if "accumulate" not in options else "", **options)
    for mine, other in zip(kept, parked, strict=True):
        assert mine["losses"] == other["losses"] and mine["evaluated"] == other["evaluated"]
        assert all(torch.equal(t, other["weights"][n]) for n, t in mine["weights"].items())
