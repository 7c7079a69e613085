"""Layers that do something else in training: a twin is in training where Keras is, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import outcore.keras
from outcore.keras.tensorflow.calls import list_calls
from tests.keras.oracle import keras

L = keras.layers


class Model(keras.Model):
    """Calls a layer as it was told to, or tells it nothing."""

    def __init__(self, layer: Any, **how: Any) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def call(self, x: Any) -> Any:
        return self.layer(x, **self.how)


class Layer(L.Layer):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def call(self, x: Any) -> Any:
        return self.layer(x)


def functional(layer: Any, **how: Any) -> Any:
    given = keras.Input((6,))
    return keras.Model(given, layer(given, **how))


def of_class(layer: Any, **how: Any) -> Any:
    model = Model(layer, **how)
    model(np.zeros((2, 6)))
    return model


CASES: dict[str, Callable[[Any], Any]] = {
    "functional": functional,
    "functional that says it": lambda layer: functional(layer, training=False),
    "sequential": lambda layer: keras.Sequential([keras.Input((6,)), layer]),
    "nested": lambda layer: functional(functional(layer)),
    "nested that says it": lambda layer: functional(functional(layer), training=False),
    "class": of_class,
    "class that says it": lambda layer: of_class(layer, training=False),
    "class in a functional model": lambda layer: functional(of_class(layer), training=False),
    "functional model in a class": lambda layer: of_class(functional(layer)),
    "layer that is a class": lambda layer: functional(Layer(layer)),
}


def changes(output: Any, x: Any) -> bool:
    return float(np.abs(np.asarray(output) - x).max()) > 0.05


@pytest.mark.parametrize("case", CASES)
def test_a_twin_trains_the_layers_that_keras_trains(case: str) -> None:
    x = np.random.default_rng(0).standard_normal((64, 6))
    for make in (lambda: L.Dropout(0.5), L.BatchNormalization, lambda: L.GaussianNoise(0.3)):
        want = [changes(CASES[case](make())(x, training=mode), x) for mode in (True, False)]
        model = CASES[case](make())
        twin = outcore.keras.to_torch(model)
        have = [changes(twin.train(mode)(torch.from_numpy(x)).detach(), x) for mode in (True, False)]
        assert have == want == [case != "class that says it", False]
        (call,) = list_calls(keras, model).calls
        assert call.fixed == (case == "class that says it") and not (call.fixed and call.training)
