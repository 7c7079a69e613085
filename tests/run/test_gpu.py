"""Ranks that share a GPU: transfers through host memory, the numbers of one rank on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outcore.run.transport.shared_memory import SharedRows
from tests.run.pool import Pool
from tests.run.stage.test_idle_state_offload import peaks
from tests.run.training import alone, difference, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(case: str, plan: dict[str, Any], shared: bool = True) -> dict[str, Any]:
    torch.backends.cudnn.deterministic = True
    reaches = SharedRows.reaches
    if not shared:
        SharedRows.reaches = lambda self, rank: False  # type: ignore[method-assign]
    try:
        result = train(case, plan, device="cuda")
    finally:
        SharedRows.reaches = reaches  # type: ignore[method-assign]
    for part in ("gradients", "weights"):
        result[part] = {n: t.cpu() for n, t in result[part].items()}
    return result


@pytest.mark.parametrize("case", ["unet", "resnet"])
def test_two_ranks_on_one_gpu(ranks: Pool, case: str) -> None:
    """Once through sockets, once through shared memory."""
    oracle = alone(case, 4, device="cpu")
    for plan, shared in (
        ({"stages": 2, "schedule": "1f1b", "micro_batches": 4}, False),
        ({"stages": 2, "schedule": "1f1b", "micro_batches": 4}, True),
        ({"stages": 2, "schedule": "gems", "batches": 4}, True),
    ):
        results = ranks.run(on_gpu, 2, case, plan, shared)
        for result in results:
            assert result["losses"] == pytest.approx(oracle["losses"], rel=1e-9)
            assert difference(result["gradients"], oracle["gradients"]) < 1e-10
            floats = {n: t for n, t in result["weights"].items() if t.is_floating_point()}
            assert difference(floats, oracle["weights"]) < 1e-8
        for name, tensor in results[0]["weights"].items():
            assert name not in results[1]["weights"] or torch.equal(tensor, results[1]["weights"][name])


def test_one_rank_takes_batches_of_the_host(ranks: Pool) -> None:
    oracle = alone("unet", 4, device="cpu")
    (result,) = ranks.run(on_gpu, 1, "unet", {"stages": 1, "schedule": "1f1b", "micro_batches": 4})
    assert result["losses"] == pytest.approx(oracle["losses"], rel=1e-9)
    assert difference(result["gradients"], oracle["gradients"]) < 1e-10


def test_the_idle_stage_of_gems_waits_on_the_host(ranks: Pool) -> None:
    """Weights, gradients and two moments of one stage less on the device, and the same numbers."""
    width = 1024
    stage = 2 * (width + 1) * width * 4
    kept, parked = ranks.run(peaks, 2, False, width, "cuda"), ranks.run(peaks, 2, True, width, "cuda")
    for (losses, before, weights), (same, after, others) in zip(kept, parked, strict=True):
        print([round(n / stage, 2) for n in (*before, *after)])
        assert losses == same and all(torch.equal(t, others[n]) for n, t in weights.items())
        assert all(less < more - 3.5 * stage for less, more in zip(after, before, strict=True))
