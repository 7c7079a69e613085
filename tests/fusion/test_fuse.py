"""What may be given to `outcore.fuse`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import FuseError


def test_an_optimizer_whose_step_needs_a_closure_is_refused_before_training() -> None:
    models = [nn.Linear(3, 2) for _ in range(2)]
    with pytest.raises(FuseError, match="a step of LBFGS has to be given a closure"):
        outcore.fuse(models, loss=nn.functional.mse_loss, optimizer=lambda params, i: torch.optim.LBFGS(params))
