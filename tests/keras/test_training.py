"""Twins in the rest of outcore: in tiles, and over ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import outcore
import outcore.keras
from outcore.run import launch
from tests.keras import ranks
from tests.keras.oracle import error, keras, keras_step, scrambled
from tests.keras.test_convert import unet

L = keras.layers
ROOT = Path(__file__).parents[2]


def test_a_keras_unet_runs_in_tiles_with_keras_gradients() -> None:
    model = scrambled(unet(2))
    for layer in model.layers:
        if isinstance(layer, L.BatchNormalization):
            layer.trainable = False
    twin = outcore.keras.to_torch(model).train()
    x = np.random.default_rng(0).standard_normal((1, 48, 64, 2))
    goal = np.random.default_rng(1).standard_normal((1, 48, 64, 3))
    want, _, gradients = keras_step(model, [x], [goal])
    streamed = outcore.stream.stream(twin, tile=16)
    output = streamed(torch.from_numpy(x))
    assert error(want[0], output.detach()) < 1e-10
    ((output - torch.from_numpy(goal)) ** 2).mean().backward()
    state = twin.state_dict(keep_vars=True)
    number = {id(v): g for v, g in zip(model.trainable_variables, gradients, strict=True)}
    for entry in twin.carried:
        gradient = number.get(id(model.weights[entry.index]))
        if gradient is not None:
            assert error(entry.to_torch(np.asarray(gradient)), state[entry.name].grad) < 1e-10, entry.path


def chain() -> Any:
    given = keras.Input((12, 12, 3))
    x = L.Conv2D(4, 3, strides=2, padding="same", activation="relu", name="one")(given)
    x = L.Conv2D(6, 3, padding="same", activation="tanh", name="two")(x)
    x = L.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(given, L.Dense(2, name="head")(x))


def test_two_ranks_train_the_weights_of_one_process_of_keras() -> None:
    model = scrambled(chain())
    twin = outcore.keras.to_torch(model)
    random = np.random.default_rng(0)
    x, goal = random.standard_normal((4, 12, 12, 3)), random.standard_normal((4, 2))
    stages = [["one"], ["two", "pool", "head"]]
    found: dict[str, torch.Tensor] = {}
    for part in launch(ranks.train, 2, twin, torch.from_numpy(x), torch.from_numpy(goal), stages, 3):
        found |= part
    for _ in range(3):
        _, _, gradients = keras_step(model, [x], [goal])
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.05 * gradient)
    assert len(found) == len(twin.carried)
    for entry in twin.carried:
        want = entry.to_torch(keras.ops.convert_to_numpy(model.weights[entry.index]))
        assert error(want, found[entry.name]) < 1e-10, entry.path


@pytest.mark.slow
def test_fit_on_the_torch_backend_trains_the_same_within_a_budget() -> None:
    environment = {**os.environ, "KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "tests.keras.fitted"]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=False)
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout.splitlines()[-1])
    assert found["worst"] < 1e-10
    assert found["calls"] >= 4  # two batches in two epochs
    assert found["changed"] > 0
