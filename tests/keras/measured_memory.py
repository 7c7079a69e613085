"""Predicted and measured peaks of ``train_on_batch`` on TensorFlow: ten models, three budgets; prints JSON lines.

    python -m tests.keras.measured_memory [name ...]

Measured is what TensorFlow's allocator has in use at the peak of the second step (`get_memory_info`), with weights and
inputs and targets, less what the process held before.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

import outcore
from outcore.errors import PlanError
from tests.keras.networks import NETWORKS
from tests.keras.oracle import keras, tf

L = keras.layers
BUDGETS = ("80%", "65%", "50%")


def _stack(normalized: bool) -> Any:
    given = keras.Input((128, 128, 8))
    x = given
    for _ in range(8):
        x = L.Conv2D(8, 3, padding="same", activation=None if normalized else "relu")(x)
        x = L.ReLU()(L.BatchNormalization()(x)) if normalized else x
    return keras.Model(given, L.Dense(4)(L.GlobalAveragePooling2D()(x)))


def _application(name: str) -> Any:
    return getattr(keras.applications, name)(weights=None, input_shape=(96, 96, 3), classes=10)


def _vision_transformer() -> Any:
    given = keras.Input((64, 64, 3))
    x = L.Reshape((256, 64))(L.Conv2D(64, 4, strides=4)(given))
    for _ in range(6):
        y = L.LayerNormalization()(x)
        x = x + L.MultiHeadAttention(4, 16)(y, y)
        x = x + L.Dense(64)(L.Dense(256, activation="gelu")(L.LayerNormalization()(x)))
    return keras.Model(given, L.Dense(10)(L.GlobalAveragePooling1D()(x)))


MODELS: dict[str, tuple[Any, int]] = {
    "stack": (lambda: _stack(False), 8),
    "stack-bn": (lambda: _stack(True), 8),
    "unet": (lambda: NETWORKS["unet_2d"](keras), 8),
    "unet-3d": (lambda: NETWORKS["unet_3d"](keras), 4),
    "relaynet": (lambda: NETWORKS["relaynet"](keras), 8),
    "vision-transformer": (_vision_transformer, 8),
    "ResNet50": (lambda: _application("ResNet50"), 8),
    "VGG16": (lambda: _application("VGG16"), 8),
    "MobileNetV2": (lambda: _application("MobileNetV2"), 8),
    "DenseNet121": (lambda: _application("DenseNet121"), 8),
}


def batch_of(model: Any, size: int) -> tuple[Any, Any]:
    """Random inputs and targets; open sides have 128 pixels, of volumes 32."""
    side = 32 if len(model.input_shape) == 5 else 128
    random = np.random.default_rng(0)

    def make(shape: Any) -> Any:
        return tf.constant(random.random((size, *(side if n is None else n for n in shape[1:])), dtype=np.float32))

    x = make(model.input_shape)
    return x, make(tuple(model(x[:1]).shape))


def measured(model: Any, x: Any, y: Any) -> int:
    """The peak of the second step."""
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse", jit_compile=False)
    model.train_on_batch(x, y)
    tf.config.experimental.reset_memory_stats("CPU:0")
    model.train_on_batch(x, y)
    return int(tf.config.experimental.get_memory_info("CPU:0")["peak"])


def rows(name: str) -> Any:
    """A row for the plain step and for every budget."""
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    make, size = MODELS[name]
    model = make()
    x, y = batch_of(model, size)
    for budget in (None, *BUDGETS):
        try:
            outcore.within(model, (x,), memory=budget, optimizer=0.0, quiet=True)
        except PlanError as error:
            yield {"model": name, "budget": budget, "refused": str(error)}
            continue
        plan = outcore.memory_plan(model)
        found = measured(model, x, y) - before
        outcore.release(model)
        yield {
            "model": name,
            "budget": budget,
            "budget_bytes": plan.budget_bytes,
            "predicted_bytes": plan.peak_bytes,
            "measured_bytes": found,
            "work": round(plan.work, 2),
            "micro_batches": plan.micro_batches,
        }


if __name__ == "__main__":
    keras.config.set_floatx("float32")
    for one in sys.argv[1:] or MODELS:
        for row in rows(one):
            print(json.dumps(row), flush=True)
        keras.backend.clear_session()
