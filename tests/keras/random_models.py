"""Random functional Keras models: sequences with masks, images, several inputs and outputs, shared layers, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def random_model(keras: Any, seed: int) -> tuple[Any, list[Any]]:
    """A model with something of everything, and inputs for it; the same for the same seed."""
    random = np.random.default_rng(seed)
    keras.utils.set_random_seed(seed)
    return (_sequence if seed % 3 == 0 else _image)(keras, random)


def _image(keras: Any, random: np.random.Generator) -> tuple[Any, list[Any]]:
    L = keras.layers
    a, b = keras.Input((8, 8, 3)), keras.Input((8, 8, 3))
    shared = L.Conv2D(4, 3, padding="same", activation="tanh")
    pool = [shared(a), shared(b)]
    norm = L.BatchNormalization()
    for _ in range(int(random.integers(3, 9))):
        x = pool[int(random.integers(len(pool)))]
        y = pool[int(random.integers(len(pool)))]
        pool.append(_grown(keras, int(random.integers(9)), x, y, norm))
    ends = [L.Dense(2)(L.GlobalAveragePooling2D()(x)) for x in (pool[-1], L.Add()(pool))]
    inputs = [random.standard_normal((2, 8, 8, 3)) for _ in range(2)]
    return keras.Model([a, b], ends if random.random() < 0.5 else [ends[1]]), inputs


def _grown(keras: Any, kind: int, x: Any, y: Any, norm: Any) -> Any:
    """One more value of eight by eight pixels and four channels."""
    L = keras.layers
    nested = [keras.Input((8, 8, 4)), L.DepthwiseConv2D(3, padding="same"), L.Dropout(0.2)]
    kinds: list[Callable[[], Any]] = [
        lambda: L.Conv2D(4, 3, padding="same", activation="relu")(x),
        lambda: norm(x),
        lambda: L.Dropout(0.4)(x),
        lambda: L.Add()([x, y]),
        lambda: keras.ops.multiply(x, y) + 0.5,
        lambda: L.Conv2D(4, 1)(L.Concatenate()([x, y])),
        lambda: L.SpatialDropout2D(0.3)(L.LayerNormalization()(x)),
        lambda: L.UpSampling2D(2)(L.MaxPooling2D(2)(x)),
        lambda: keras.Sequential(nested)(x),
    ]
    return kinds[kind]()


def _sequence(keras: Any, random: np.random.Generator) -> tuple[Any, list[Any]]:
    L = keras.layers
    tokens = keras.Input((6,), dtype="int32")
    x = L.Embedding(9, 4, mask_zero=True)(tokens)
    for _ in range(int(random.integers(2, 5))):
        kind = int(random.integers(4))
        if kind == 0:
            x = L.LSTM(4, return_sequences=True, dropout=0.2)(x)
        elif kind == 1:
            x = L.Dropout(0.3)(x)
        elif kind == 2:
            x = x + L.MultiHeadAttention(2, 2, dropout=0.1)(x, x)
        else:
            x = L.Dense(4, activation="tanh")(L.LayerNormalization()(x))
    return keras.Model(tokens, L.Dense(2)(L.GRU(3)(x))), [random.integers(0, 9, (2, 6)).astype("int32")]
