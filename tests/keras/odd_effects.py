"""Programs whose layers do something beside their result, in functions of the backend itself: draw, count, print.

Run again in backward, such a layer has another mask, or counts twice.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from tests.keras.drawn_fits import TORCH
from tests.keras.fit_program import K, L, fit, keras, program

tf: Any = None if TORCH else importlib.import_module("tensorflow")
torch: Any = importlib.import_module("torch")


class Dropped(L.Layer):
    """Draws from the state of the backend, as layers of old do."""

    def call(self, x: Any, training: bool | None = None) -> Any:
        if TORCH:
            return torch.nn.functional.dropout(x, 0.4, bool(training))
        return tf.nn.dropout(x, 0.4) if training else x


class DrawnInALoop(L.Layer):
    """Draws inside of a loop of the backend."""

    def call(self, x: Any, training: bool | None = None) -> Any:
        if TORCH or not training:
            return x

        def turn(n: Any, y: Any) -> Any:
            return n + 1, y * tf.random.uniform(tf.shape(y), 0.5, 1.5, dtype=y.dtype)

        return tf.while_loop(lambda n, y: n < 3, turn, (0, x))[1]


class DrawnInABranch(L.Layer):
    """Draws inside of a branch, inside of a traced function."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = None if TORCH else tf.function(lambda x: x * tf.random.uniform(tf.shape(x), dtype=x.dtype))

    def call(self, x: Any, training: bool | None = None) -> Any:
        if TORCH or not training:
            return x
        return tf.cond(tf.reduce_sum(x) > -1e9, lambda: self.inner(x), lambda: x)


class CountedInALoop(L.Layer):
    """Changes a variable of its own inside of a loop, behind Keras' back."""

    def build(self, shape: Any) -> None:
        self.turns = self.add_weight(shape=(), initializer="zeros", trainable=False, name="turns")

    def call(self, x: Any, training: bool | None = None) -> Any:
        if TORCH or not training:
            return x

        def turn(n: Any, y: Any) -> Any:
            self.turns.value.assign_add(tf.cast(1, self.turns.dtype))
            return n + 1, y * 1.1

        made = tf.while_loop(lambda n, y: n < 3, turn, (0, x))[1]
        return made * tf.cast(1 + 0.01 * self.turns.value, x.dtype)


class Stateful:
    """A Python function with a state."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, x: Any) -> Any:
        self.seen += 1
        return np.asarray(x) * 0.1 * self.seen


class InPython(L.Layer):
    """Calls a Python function for its value."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.function = Stateful()

    def call(self, x: Any) -> Any:
        if TORCH:
            return x
        made = tf.numpy_function(self.function, [x], x.dtype)
        made.set_shape(x.shape)
        return x + tf.stop_gradient(made)


class Generated(L.Layer):
    """Draws from a generator of TensorFlow's, which Keras does not know."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.source = None if TORCH else tf.random.Generator.from_seed(3)

    def call(self, x: Any, training: bool | None = None) -> Any:
        if TORCH or not training:
            return x
        return x + 0.1 * self.source.normal(tf.shape(x), dtype=x.dtype)


class Noisy(L.Layer):
    """Draws from Keras' own generator, which is made when it is first used."""

    def call(self, x: Any, training: bool | None = None) -> Any:
        if TORCH or not training:  # on torch, outcore refuses it in a sentence
            return x
        return x + keras.random.normal(K.shape(x), dtype=x.dtype, stddev=0.3)


EFFECTS = (Dropped, DrawnInALoop, DrawnInABranch, CountedInALoop, InPython, Generated, Noisy)
"""Layers that may not run twice."""


def with_effects(kind: Any) -> Any:
    """A model that has such a layer in several places."""
    x = given = keras.Input((6,))
    for number in range(3):
        x = L.Dense(8, activation="gelu")(kind(name=f"odd_{number}")(x))
    return keras.Model(given, L.Dense(2)(x))


@program
def effects_of_the_backend(manage: Any) -> Any:
    found = []
    for kind in EFFECTS:
        keras.utils.set_random_seed(7)  # as `fit` does: a traced function keeps the seed under which it was traced
        found += fit(with_effects(kind), manage)
    return found
