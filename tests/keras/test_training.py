"""Twins in the rest of outcore: in tiles, and over ranks."""

from __future__ import annotations

import functools
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
from tests.keras.networks import APPLICATIONS, NETWORKS
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


def chain(normalized: bool = False) -> Any:
    given = keras.Input((12, 12, 3))
    x = L.Conv2D(4, 3, strides=2, padding="same", activation="relu", name="one")(given)
    x = L.BatchNormalization(name="norm")(x) if normalized else x
    x = L.Conv2D(6, 3, padding="same", activation="tanh", name="two")(x)
    x = L.Conv2D(6, 3, padding="same", activation="tanh", name="three")(x)
    x = L.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(given, L.Dense(2, name="head")(x))


def over_ranks(model: Any, stages: list[list[str]], steps: int, **how: Any) -> None:
    """Train on as many ranks as stages; Keras alone, over the same parts of the batch, has the same weights."""
    twin = outcore.keras.to_torch(model)
    random = np.random.default_rng(0)
    x, goal = random.standard_normal((8, 12, 12, 3)), random.standard_normal((8, 2))
    found: dict[str, torch.Tensor] = {}
    run = functools.partial(ranks.train, **how)
    for part in launch(run, len(stages), twin, torch.from_numpy(x), torch.from_numpy(goal), stages, steps):
        found |= part
    parts = (how.get("micro_batches", 1) * how.get("batches", 1)) if how else 2
    for _ in range(steps):
        total = [np.zeros(tuple(v.shape)) for v in model.trainable_variables]
        for a, b in zip(np.split(x, parts), np.split(goal, parts), strict=True):
            _, _, gradients = keras_step(model, [a], [b])
            total = [t + np.asarray(g) / parts for t, g in zip(total, gradients, strict=True)]
        for variable, gradient in zip(model.trainable_variables, total, strict=True):
            variable.assign_sub(0.05 * gradient)
    trained = {id(v) for v in model.trainable_variables}
    checked = 0
    for entry in twin.carried:
        if id(model.weights[entry.index]) in trained:
            want = entry.to_torch(keras.ops.convert_to_numpy(model.weights[entry.index]))
            assert error(want, found[entry.name]) < 1e-10, entry.path
            checked += 1
    assert checked == len(trained)


def test_two_ranks_train_the_weights_of_one_process_of_keras() -> None:
    over_ranks(scrambled(chain()), [["one"], ["two", "three", "pool", "head"]], 3)


@pytest.mark.slow
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "how", [{"schedule": "1f1b", "micro_batches": 4}, {"schedule": "gems", "batches": 4}], ids=["1f1b", "gems"]
)
def test_ranks_train_the_weights_of_one_process_of_keras(how: dict[str, Any], count: int, normalized: bool) -> None:
    """Batch normalization, too: every micro-batch has statistics of its own, in Keras as over ranks."""
    first = ["one", "norm"] if normalized else ["one"]
    cuts = {2: [first, ["two", "three", "pool", "head"]], 4: [first, ["two"], ["three"], ["pool", "head"]]}
    over_ranks(scrambled(chain(normalized)), cuts[count], 20, **how)


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
    assert found["copies"] > 4  # weights, gradients and two of Adam's: what is trained was found by its names


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NETWORKS, *APPLICATIONS])
def test_a_twin_is_keras_on_torch_in_float64(name: str) -> None:
    """Where Keras itself computes in float64, twins differ by rounding alone: outputs, gradients, 20 steps."""
    environment = {**os.environ, "KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "tests.keras.on_torch", name]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600, check=False)
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout.splitlines()[-1])
    assert all(found.pop(key) < 1e-10 for key in ("output", "loss", "gradient")), found
    assert all(value < 1e-10 for key, value in found.items() if key != "name"), found
