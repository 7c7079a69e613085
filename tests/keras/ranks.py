"""What ranks do in tests: train a twin in two stages. Keras is not imported here: a twin does without it."""

from __future__ import annotations

import sys
from typing import Any

import torch

import outcore


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def train(
    twin: Any, inputs: torch.Tensor, target: torch.Tensor, stages: Any, steps: int, **how: Any
) -> dict[str, torch.Tensor]:
    """The weights of this rank's stages after some steps."""
    how = how or {"micro_batches": 2}
    parts = how.get("micro_batches", 1) * how.get("batches", 1)
    graph = outcore.capture(twin.train(), (inputs[: len(inputs) // parts],))
    plan = outcore.Plan(graph.fingerprint, stages, **how)
    engine = outcore.Engine(twin, plan, loss=square, optimizer=sgd, example=inputs, device="cpu")
    for _ in range(steps):
        engine.step(inputs, target)
    assert "keras" not in sys.modules
    return {name: value.detach().clone() for name, value in engine.parameters.items()}
