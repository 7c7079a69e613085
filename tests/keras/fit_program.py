"""What programs around ``fit`` are made of: data, small models, and all the numbers that come of one.

A program is a function of `manage`, which puts a model under outcore or leaves it alone, and returns numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outcore.keras.installed import require_keras

keras = require_keras()
L, K = keras.layers, keras.ops
PROGRAMS: dict[str, Callable[[Any], Any]] = {}
RANDOM_X = np.random.default_rng(0).standard_normal((8, 6))
IMAGES = np.random.default_rng(1).standard_normal((8, 8, 8, 3))
SEQUENCES = np.random.default_rng(2).standard_normal((8, 5, 3))
TOKENS = np.random.default_rng(3).integers(0, 7, (8, 5)).astype("int32")
GOALS = np.random.default_rng(4).standard_normal((8, 2))
CLASSES = np.random.default_rng(5).integers(0, 3, (8,))


def program(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    PROGRAMS[make.__name__] = make
    return make


def numbers(model: Any, *more: Any) -> list[Any]:
    """All variables of a model and its optimizer, and whatever else."""
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    return [np.array(K.convert_to_numpy(v), "float64") for v in variables] + [np.array(x, "float64") for x in more]


def history(found: Any) -> list[Any]:
    return [values for _, values in sorted(found.history.items())]


def dense(inner: Any = None, out: int = 2, **options: Any) -> Any:
    given = keras.Input((6,))
    x = L.Dense(7, activation="tanh", **options)(given)
    x = inner(x) if inner is not None else x
    return keras.Model(given, L.Dense(out)(L.Dense(5, activation="relu")(x)))


def images(*layers: Any, out: int = 2) -> Any:
    x = given = keras.Input((8, 8, 3))
    for layer in layers:
        x = layer(x)
    return keras.Model(given, L.Dense(out)(L.GlobalAveragePooling2D()(x)))


def fit(model: Any, manage: Any, x: Any = RANDOM_X, y: Any = GOALS, loss: Any = "mse", **how: Any) -> list[Any]:
    """Compile, manage, and fit; all that came of it."""
    compiled = {k: how.pop(k) for k in ("metrics", "weighted_metrics", "loss_weights", "run_eagerly") if k in how}
    optimizer = how.pop("optimizer", None) or keras.optimizers.Adam(0.01)
    compiled |= {"steps_per_execution": how.pop("steps_per_execution", 1), "jit_compile": how.pop("jit_compile", False)}
    model.compile(optimizer, loss, **compiled)
    manage(model, keras.tree.map_structure(lambda a: a[:4], x))
    keras.utils.set_random_seed(7)
    how = {"epochs": 2, "batch_size": 4, "verbose": 0} | how
    found = history(model.fit(x, y, **how))
    predicted = keras.tree.flatten(model.predict(x, verbose=0, batch_size=4))
    return numbers(model, *found, *predicted)
