"""Run with ``KERAS_BACKEND=torch``: ``model.fit`` under `outcore.within` against plain ``model.fit``; prints JSON."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np

import outcore

L = keras.layers


def build() -> Any:
    keras.utils.set_random_seed(0)
    given = keras.Input((16, 16, 3))
    x = L.BatchNormalization()(L.Conv2D(8, 3, padding="same", activation="relu")(given))
    x = L.BatchNormalization()(L.Conv2D(8, 3, padding="same", activation="relu")(x))
    return keras.Model(given, L.Dense(2)(L.GlobalAveragePooling2D()(x)))


def fit(model: Any) -> list[Any]:
    random = np.random.default_rng(0)
    x, y = random.random((8, 16, 16, 3)), random.random((8, 2))
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [keras.ops.convert_to_numpy(weight) for weight in model.weights]


def main() -> None:
    keras.config.set_floatx("float64")
    plain = fit(build())
    model = build()
    example = keras.ops.convert_to_tensor(np.zeros((4, 16, 16, 3)))
    outcore.within(model, (example,), {"training": True}, memory="80%", quiet=True)
    managed = model.__dict__["forward"]
    calls, run = [], managed.run
    managed.run = lambda *args, **kwargs: (calls.append(1), run(*args, **kwargs))[1]
    found = fit(model)
    changed = sum(1 for policy in outcore.memory_plan(model).policy.values() if type(policy).__name__ != "Keep")
    worst = max(float(np.abs(a - b).max()) for a, b in zip(plain, found, strict=True))
    print(json.dumps({"worst": worst, "calls": len(calls), "changed": changed}))


if __name__ == "__main__":
    main()
