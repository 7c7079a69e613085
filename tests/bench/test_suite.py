"""The suite: every family trains and is recorded, and results hold the figures that they should."""

from __future__ import annotations

import pytest
import torch

from outcore.bench.families import FAMILIES, family
from outcore.bench.suite import run_suite
from outcore.cost.training_network import capture_training
from outcore.errors import JobError
from outcore.machine import parse


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_at_reduced_size(name: str) -> None:
    torch.manual_seed(0)
    job = family(name, reduced=True)
    model = job.build()
    args, _, target = job.example()
    assert job.loss is not None and job.optimizer is not None
    loss = job.loss(model(*args), target)
    loss.backward()
    unused = [n for n, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert loss.ndim == 0 and torch.isfinite(loss) and len(unused) <= 2  # the detector's body has a head of its own
    job.optimizer(model.parameters()).step()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if "speech" not in name])
def test_a_family_is_recorded_at_full_size(name: str) -> None:
    job = family(name)
    assert len(capture_training(job, 1).calls) > 5


def test_results_hold_the_figures_of_the_suite() -> None:
    from dataclasses import replace

    cpu = replace(parse("v100").devices[0], kind="cpu", name="cpu")
    found = run_suite(["recommendation", "reinforcement"], reduced=True, seconds=0.05, device=cpu)
    for row in found.families:
        assert not row.error and row.samples_per_s == pytest.approx(row.batch / row.step_s)
        assert row.memory_bytes["weights"] > 0 and sum(row.memory_bytes.values()) == row.peak_bytes
        assert row.peak_share["fp32"] > 0
    page = found.page()
    assert page.count("<tr>") == 3 and "reinforcement learning" in page
    assert "feature maps" in page and "feature_maps" not in page and "device busy" not in page  # on a CPU


def test_an_unknown_family_names_the_known_ones() -> None:
    with pytest.raises(JobError, match="speech recognition"):
        family("speach")
