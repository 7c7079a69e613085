"""What tests of fused operations share: a model under `exact="reassociated"`, and what of it runs as something else."""

from typing import Any

import torch
from torch import nn

import outcore
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.planner.memory.plan import MemoryPlan


def managed(model: nn.Module, images: torch.Tensor, **options: Any) -> MemoryPlan:
    """Take a model within no budget, unless options say otherwise; returns its plan."""
    given = {"memory": None, "optimizer": 0.0, "quiet": True, "measure_s": 0.3, "exact": "reassociated"} | options
    plan = outcore.memory_plan(outcore.within(model, (images,), **given))
    assert isinstance(plan, MemoryPlan)
    return plan


def replaced(model: nn.Module) -> set[str]:
    """The calls of a managed model that run as something else."""
    managed_forward = model.__dict__["forward"]
    assert isinstance(managed_forward, ManagedForward)
    return {
        name
        for e in managed_forward.admitted.values()
        if e is not None
        for name in (e.compiled.instead if e.compiled is not None else ())
    }
