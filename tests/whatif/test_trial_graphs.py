"""A step recorded as a CUDA graph keeps what it reads."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.whatif.setup import TrainingSetup
from outcore.whatif.trial import _warm


@pytest.mark.gpu
def test_a_recorded_step_holds_its_model_and_its_batch() -> None:
    models: list[weakref.ref[nn.Module]] = []

    def model() -> nn.Module:
        made = nn.Linear(8, 3)
        models.append(weakref.ref(made))
        return made

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 8), torch.randint(3, (size,))

    job = outcore.Job(model=model, batch=batch, loss=F.cross_entropy, optimizer=torch.optim.Adam, size=4, name="linear")
    step, _ = _warm(TrainingSetup(job, cuda_graph=True), torch.device("cuda"), 0.0)
    gc.collect()
    trained = models[-1]()
    assert trained is not None
    weights = trained.weight.detach().clone()
    step()
    assert not torch.equal(weights, trained.weight)
