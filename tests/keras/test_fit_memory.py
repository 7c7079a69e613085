"""What ``fit`` holds beside a model is counted, and budgets are kept by ``fit`` on the torch backend."""

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

from outcore.keras.fit_loss import FitLoss, regularized_bytes
from outcore.keras.torch_backend import _without_logits
from outcore.one_device.keras_fit import inputs_of
from tests.keras.networks import MEMORY
from tests.keras.oracle import keras

L = keras.layers
ROOT = Path(__file__).parents[2]


def two_headed(loss: Any) -> Any:
    given = keras.Input((8,))
    made = {"z": L.Dense(3, kernel_regularizer="l2")(given), "a": L.Reshape((2, 5))(L.Dense(10)(given))}
    model = keras.Model(given, made)
    model.compile("sgd", loss)
    return model


def test_targets_are_as_large_as_the_loss_asks_for() -> None:
    model = two_headed({"z": "mse", "a": keras.losses.SparseCategoricalCrossentropy(from_logits=True)})
    output = {"z": np.zeros((4, 3), "float32"), "a": np.zeros((4, 2, 5), "float32")}
    seen = []
    FitLoss(keras, model).targets(output, lambda one, shape, whole: seen.append((shape, whole)))
    assert seen == [((4, 2), True), ((4, 3), False)]
    size = np.dtype(model.weights[0].dtype).itemsize
    assert regularized_bytes(model) == 4 * 8 * 3 * size
    tensors = {name: torch.zeros(array.shape) for name, array in output.items()}
    assert FitLoss(keras, model).bytes_of_targets(tensors) == 8 * 8 + 12 * 4 + regularized_bytes(model)


def test_logits_are_not_taken_along_while_they_are_not_wanted() -> None:
    tensor = torch.zeros(2)
    with _without_logits(), pytest.raises(AttributeError):
        tensor._keras_logits = tensor  # type: ignore[attr-defined]
    tensor._keras_logits = 1  # type: ignore[attr-defined]
    assert not hasattr(torch.Tensor, "_keras_logits")


def test_several_inputs_may_be_given_one_by_one_by_name_or_by_shape() -> None:
    """On torch as on TensorFlow, though Keras calls such a model with one list or dict."""
    a, b = keras.Input((3,), dtype="int32", name="p"), keras.Input((4,), dtype="float32", name="q")
    listed, named = keras.Model([a, b], [a, b]), keras.Model({"q": b, "p": a}, [a, b])
    x, y = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 4)
    for given in ([(2, 3), (2, 4)], ((x, y),), ([x, (2, 4)],), (x, y)):
        (made,) = inputs_of(listed, given)
        assert [(tuple(one.shape), one.dtype) for one in made] == [((2, 3), x.dtype), ((2, 4), y.dtype)]
    for one in ({"p": (2, 3), "q": y}, ({"q": (2, 4), "p": x},)):
        (made,) = inputs_of(named, one)
        assert {name: (tuple(t.shape), t.dtype) for name, t in made.items()} == {
            "p": ((2, 3), x.dtype), "q": ((2, 4), y.dtype)
        }  # fmt: skip
    assert inputs_of(listed, [(2, 3)]) == [(2, 3)]  # what does not fit is refused by what calls the model
    assert inputs_of(keras.Model(a, a), [(2, 3)]) == [(2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMORY)
def test_fit_on_torch_keeps_its_budget(name: str) -> None:
    environment = {**os.environ, "KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "tests.keras.fitted_memory", name]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=900, check=False)
    assert shown.returncode == 0, shown.stderr
    rows = [json.loads(line) for line in shown.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 4
    for row in rows[1:]:
        print(row)
        assert "refused" in row or row["measured_bytes"] <= row["budget_bytes"], row
