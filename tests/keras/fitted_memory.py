"""Run with ``KERAS_BACKEND=torch``: predicted and measured peaks of ``train_on_batch``; prints JSON lines.

    KERAS_BACKEND=torch python -m tests.keras.fitted_memory [name ...]

Measured are the bytes of living tensors at the peak of the second step: those that operations made, and the weights.
The loss and its gradient are Keras' and not in the prediction, so the output counts twice more.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import keras
import torch

import outcore
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.errors import OutcoreError
from tests.keras.networks import NETWORKS

BUDGETS = (None, "85%", "70%")


def batch_of(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and goals; open sides have 64 pixels, of volumes 16."""
    side = 16 if len(model.input_shape) == 5 else 64
    shape = (8, *(side if n is None else n for n in model.input_shape[1:]))
    x = torch.randint(7, shape) if "int" in str(model.inputs[0].dtype) else torch.randn(shape)
    with torch.no_grad():
        return x, torch.randn(model(x).shape)


def measured(model: Any, x: torch.Tensor, y: torch.Tensor) -> int:
    """The peak of the second step, weights in it."""
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    model.train_on_batch(x, y)
    weights = [v.value for v in model.variables]
    with LiveBytes([*weights, x, y]) as live:
        model.train_on_batch(x, y)
    return live.peak + sum(w.nbytes for w in weights) + x.nbytes


def rows(name: str) -> Any:
    """A row for the plain step and for every budget."""
    for budget in BUDGETS:
        keras.utils.set_random_seed(0)
        model = NETWORKS[name](keras)
        x, y = batch_of(model)
        try:
            outcore.within(model, (x,), {"training": True}, memory=budget, optimizer=0.0, measure_s=0.5, quiet=True)
        except OutcoreError as error:
            yield {"model": name, "budget": budget, "refused": str(error)}
            continue
        plan: Any = outcore.memory_plan(model)
        found = measured(model, x, y)
        row = {"model": name, "budget": budget, "budget_bytes": plan.budget_bytes, "predicted_bytes": plan.peak_bytes}
        yield row | {"measured_bytes": found, "loss_bytes": 2 * y.nbytes}


if __name__ == "__main__":
    for one in sys.argv[1:] or NETWORKS:
        for row in rows(one):
            print(json.dumps(row), flush=True)
