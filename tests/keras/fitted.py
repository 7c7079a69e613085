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


class Dense(keras.Model):  # type: ignore[misc]
    """A class whose layers are built by a call, nearly all of whose memory is weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = L.Dense(256, activation="relu"), L.Dense(256)

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))


def copies_of_weights() -> float:
    """How many times its weights a class is said to hold when it is planned first; Adam has three more at least."""
    model = Dense()
    example = keras.ops.convert_to_tensor(np.zeros((2, 256)))
    model(example)
    model.compile("adam", "mse")
    outcore.within(model, (example,), memory="100%", measure_s=0.1, quiet=True, stream=False)
    weights = sum(v.value.nbytes for v in model.variables)
    return outcore.memory_plan(model).plain_bytes / weights


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
    print(json.dumps({"worst": worst, "calls": len(calls), "changed": changed, "copies": copies_of_weights()}))


if __name__ == "__main__":
    main()
