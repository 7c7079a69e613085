"""Plain Keras as the oracle: outputs, gradients and steps of a model against those of its twin."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import outcore.keras as outcore_keras
from outcore.keras.check import example_inputs
from outcore.keras.installed import require_keras
from outcore.keras.symbolic import inputs_of
from outcore.keras.twin import leaves

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
keras = require_keras()
tf = importlib.import_module("tensorflow")
TOLERANCE = 1e-10


def without_dropout(model: Any) -> Any:
    """The same model with nothing random in it, and with scales that Keras does not round.

    On TensorFlow, the constants of `Rescaling` pass through float32 in a float64 model too.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Rescaling):
            layer.scale = np.asarray(layer.scale, dtype="float32").astype("float64")
            layer.offset = np.asarray(layer.offset, dtype="float32").astype("float64")
        for name in ("rate", "drop_path_rate", "_dropout"):
            if hasattr(layer, name):
                setattr(layer, name, 0.0)
    return model


def scrambled(model: Any, seed: int = 0) -> Any:
    """The same model with biases and statistics that are not zero or one."""
    random = np.random.default_rng(seed)
    for variable in model.weights:
        if variable.dtype.startswith("float") and len(variable.shape) <= 1:
            noise = random.uniform(0.05, 0.3, tuple(variable.shape))
            variable.assign(keras.ops.convert_to_numpy(variable) + noise)
    return model


def as_given(model: Any, inputs: list[Any]) -> Any:
    structure = inputs_of(keras, model)
    if isinstance(structure, dict):
        return dict(zip(sorted(structure), inputs, strict=True))
    return inputs if isinstance(structure, (list, tuple)) else inputs[0]


def error(want: Any, have: Any) -> float:
    """The largest difference, relative to the largest value where that is above one."""
    want, have = np.asarray(want, dtype="float64"), np.asarray(have, dtype="float64")
    assert want.shape == have.shape, (want.shape, have.shape)
    scale = max(1.0, float(np.abs(want).max(initial=0.0)))
    return float(np.abs(want - have).max(initial=0.0)) / scale


def keras_step(model: Any, inputs: list[Any], goals: list[Any]) -> tuple[list[Any], float, list[Any]]:
    """Outputs, loss and gradients in training."""
    given = as_given(model, [tf.convert_to_tensor(x) for x in inputs])
    with tf.GradientTape() as tape:
        outputs = list(leaves(model(given, training=True)))
        loss = sum(tf.reduce_mean((out - goal) ** 2) for out, goal in zip(outputs, goals, strict=True))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    return (
        [o.numpy() for o in outputs],
        float(loss),
        [tf.convert_to_tensor(g) if g is not None else None for g in gradients],
    )


def compare(
    model: Any, *, steps: int = 3, size: int = 32, batch: int = 2, lr: float = 0.05, within: float = TOLERANCE
) -> Any:
    """Carry a model over, train both, and carry it back; every difference is asserted to be rounding."""
    twin = outcore_keras.to_torch(scrambled(without_dropout(model)))
    inputs = example_inputs(model, size, batch)
    tensors = [torch.from_numpy(x) for x in inputs]
    with torch.no_grad():
        mine = [x.numpy() for x in leaves(twin.eval()(*tensors))]
    theirs = [x.numpy() for x in leaves(model(as_given(model, inputs), training=False))]
    for want, have in zip(theirs, mine, strict=True):
        assert error(want, have) < within
    random = np.random.default_rng(1)
    goals = [random.standard_normal(out.shape) for out in theirs]
    optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=lr)
    twin.train()
    for _ in range(steps):
        want_outputs, want_loss, gradients = keras_step(model, inputs, goals)
        optimizer.zero_grad()
        outputs = list(leaves(twin(*tensors)))
        loss = sum(((out - torch.from_numpy(goal)) ** 2).mean() for out, goal in zip(outputs, goals, strict=True))
        loss.backward()
        for want, have in zip(want_outputs, outputs, strict=True):
            assert error(want, have.detach()) < within
        assert abs(want_loss - loss.item()) < within * max(1.0, abs(want_loss))
        compare_gradients(model, twin, gradients, within)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            if gradient is not None:
                variable.assign_sub(lr * gradient)
        optimizer.step()
    state = twin.state_dict(keep_vars=True)
    for entry in twin.carried:
        want = entry.to_torch(keras.ops.convert_to_numpy(model.weights[entry.index]))
        assert error(want, state[entry.name].detach()) < within, entry.path
    return twin


def compare_gradients(model: Any, twin: Any, gradients: list[Any], within: float) -> None:
    by_path = {id(v): g for v, g in zip(model.trainable_variables, gradients, strict=True)}
    state = twin.state_dict(keep_vars=True)
    largest = max([float(np.abs(g).max(initial=0.0)) for g in gradients if g is not None], default=0.0)
    for entry in twin.carried:
        variable, held = model.weights[entry.index], state[entry.name]
        assert held.requires_grad == (id(variable) in by_path), entry.path
        if id(variable) not in by_path:
            continue
        gradient = by_path[id(variable)]
        zero = np.zeros(tuple(variable.shape))
        want = entry.to_torch(zero if gradient is None else np.asarray(gradient))
        have = torch.zeros_like(held) if held.grad is None else held.grad
        assert float((want - have).abs().max()) <= within * max(1.0, largest), entry.path


def in_float64() -> Iterator[None]:
    """A test's surroundings: float64 whatever was built before it, and the same random numbers."""
    before = keras.config.floatx()
    keras.backend.clear_session()  # the first layer of all, at import, has settled in which type layers compute
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    try:
        yield
    finally:
        keras.config.set_floatx(before)
        keras.backend.clear_session()
