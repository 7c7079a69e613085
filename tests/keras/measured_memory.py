"""Predicted and measured peaks of ``fit`` on TensorFlow: thirteen models, three budgets; prints JSON lines.

    python -m tests.keras.measured_memory [name ...]

Measured is what TensorFlow's allocator has in use at the peak of six steps (`get_memory_info`), with weights,
optimizer state, inputs and targets, less what the process held before; and, as ``living_bytes``, the tensors alone,
without what the allocator gives too much (`living_bytes`). Budgets are shares of what the plain step is predicted to
take. Where one is refused, the smallest that was named is tried last.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

import outcore
from outcore.errors import PlanError
from tests.keras.living_bytes import living_bytes
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


def _gru() -> Any:
    """Recurrent layers in both directions, whose loops collect what their gradients need."""
    given = keras.Input((48, 64))
    x = given
    for _ in range(3):
        x = L.LayerNormalization()(L.Bidirectional(L.GRU(48, return_sequences=True))(x))
    return keras.Model(given, L.Dense(10)(L.GlobalAveragePooling1D()(x)))


MODELS: dict[str, tuple[Any, int]] = {
    "stack": (lambda: _stack(False), 8),
    "stack-bn": (lambda: _stack(True), 8),
    "unet": (lambda: NETWORKS["unet_2d"](keras), 8),
    "unet-3d": (lambda: NETWORKS["unet_3d"](keras), 4),
    "relaynet": (lambda: NETWORKS["relaynet"](keras), 8),
    "cosmoflow": (lambda: NETWORKS["cosmoflow"](keras), 16),
    "vision-transformer": (_vision_transformer, 8),
    "gru": (_gru, 64),
    "ResNet50": (lambda: _application("ResNet50"), 8),
    "VGG16": (lambda: _application("VGG16"), 8),
    "MobileNet": (lambda: _application("MobileNet"), 8),
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
    if "int" in str(model.inputs[0].dtype):
        x = tf.cast(x * 7, tf.int32)  # tokens
    return x, make(tuple(model(x[:1]).shape))


def measured(model: Any, x: Any, y: Any) -> int:
    """The peak of two epochs of ``fit``, of three steps each, the first step in it."""
    data = tf.data.Dataset.from_tensors((x, y)).repeat(3)
    tf.config.experimental.reset_memory_stats("CPU:0")
    model.fit(data, epochs=2, shuffle=False, verbose=0)
    return int(tf.config.experimental.get_memory_info("CPU:0")["peak"])


def living(model: Any, x: Any, y: Any) -> int:
    """The bytes of living tensors at the peak of an epoch of three steps."""
    data = tf.data.Dataset.from_tensors((x, y)).repeat(3)
    return living_bytes(lambda: model.fit(data, shuffle=False, verbose=0))


def build(name: str) -> tuple[Any, Any, Any, int]:
    """A compiled model, a batch for it, and the bytes that were in use before."""
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    keras.utils.set_random_seed(0)
    make, size = MODELS[name]
    model = make()
    model.compile(optimizer=keras.optimizers.Adam(1e-4), loss="mse", jit_compile=False)
    return model, *batch_of(model, size), before


def rows(name: str) -> Any:
    """A row for plain ``fit``, for every budget, and for the smallest that a refusal has named."""
    model, x, y, before = build(name)
    outcore.within(model, (x,), memory=None, quiet=True)
    plain = outcore.memory_plan(model).peak_bytes
    outcore.release(model)
    found = {"measured_bytes": measured(model, x, y) - before, "living_bytes": living(model, x, y) - before}
    yield {"model": name, "budget": None, "predicted_bytes": plain} | found
    named: int | None = None
    for budget in (*BUDGETS, "smallest"):
        if budget == "smallest" and named is None:
            continue
        begun = time.perf_counter()
        memory = named if budget == "smallest" else int(float(budget[:-1]) / 100 * plain)
        try:
            outcore.within(model, (x,), memory=memory, quiet=True)
        except PlanError as error:
            named = error.least_bytes
            yield {"model": name, "budget": budget, "refused": str(error)}
            continue
        plan = outcore.memory_plan(model)
        row = {
            "model": name,
            "budget": budget,
            "budget_bytes": plan.budget_bytes,
            "predicted_bytes": plan.peak_bytes,
            "work": round(plan.work, 2),
            "micro_batches": plan.micro_batches,
            "planning_s": round(time.perf_counter() - begun, 1),
        }
        found = {"measured_bytes": measured(model, x, y) - before, "living_bytes": living(model, x, y) - before}
        yield row | found
        outcore.release(model)


if __name__ == "__main__":
    keras.config.set_floatx("float32")
    for one in sys.argv[1:] or MODELS:
        for row in rows(one):
            print(json.dumps(row), flush=True)
        keras.backend.clear_session()
