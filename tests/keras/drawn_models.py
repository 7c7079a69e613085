"""Functional Keras models drawn at random, for the twin: images in both layouts, volumes, sequences, vectors, tokens.

A model has one to three inputs. Values are drawn from those there are, and a layer that suits their rank is put on
them: convolutions of odd sizes, pools, norms, recurrent layers, attention, preprocessing, merges, layers and nested
models that are called twice. One to three values are outputs, alone, as a list, or by name. Nothing is random when a
model runs. All of it runs on Keras' torch backend, which has both layouts on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

ACTIVATIONS = (None, "relu", "tanh", "silu", "gelu", "sigmoid", "softplus", "elu", "leaky_relu", "softmax")
Value = Any


class Drawn:
    """A model that is being drawn.

    Args:
        keras: the module.
        seed: the same model for the same number.
    """

    def __init__(self, keras: Any, seed: int) -> None:
        self.keras, self.L, self.K = keras, keras.layers, keras.ops
        self.random = np.random.default_rng(seed)
        self.layout = self.pick("channels_last", "channels_first")
        self.inputs: list[Value] = []
        self.given: list[Any] = []
        self.pool: list[Value] = []
        keras.utils.set_random_seed(seed)

    def pick(self, *options: Any) -> Any:
        """One of several."""
        return options[int(self.random.integers(len(options)))]

    def number(self, low: int, high: int) -> int:
        """A whole number, both ends in it."""
        return int(self.random.integers(low, high + 1))

    def model(self) -> tuple[Any, list[Any]]:
        """The model, and a batch of three for it."""
        for kind in self.random.choice(["image", "volume", "sequence", "vector", "tokens"], self.number(1, 3)):
            self._input(str(kind))
        for _ in range(self.number(4, 12)):
            self._grow()
            self.pool = [x for x in self.pool if None not in x.shape[1:]]  # a size that Keras does not know
        ends = [self.pool[-1], *self.random.permutation(len(self.pool))[: self.number(0, 2)]]
        outputs = [self._end(self.pool[x] if isinstance(x, (int, np.integer)) else x) for x in ends]
        if len(outputs) == 1:
            shaped: Any = outputs[0]
        else:
            shaped = self.pick(outputs, {f"out_{n}": x for n, x in enumerate(outputs)})
        return self.keras.Model(self.inputs if len(self.inputs) > 1 else self.inputs[0], shaped), self.given

    def _input(self, kind: str) -> None:
        shape = {
            "image": (self.number(7, 13), self.number(7, 13), self.number(1, 3)),
            "volume": (self.number(4, 6), self.number(4, 6), self.number(4, 6), 2),
            "sequence": (self.number(4, 7), self.number(2, 4)),
            "vector": (self.number(3, 6),),
            "tokens": (self.number(3, 6),),
        }[kind]
        if self.layout == "channels_first" and kind in ("image", "volume"):
            shape = (shape[-1], *shape[:-1])
        tensor = self.keras.Input(shape, dtype="int32" if kind == "tokens" else None)
        self.inputs.append(tensor)
        if kind == "tokens":
            self.given.append(self.random.integers(0, 7, (3, *shape)).astype("int32"))
            more = [self.L.Embedding(7, 4), self.L.CategoryEncoding(7, output_mode=self.pick("multi_hot", "count"))]
            self.pool += [layer(tensor) for layer in more[: self.number(1, 2)]]
        else:
            self.given.append(self.random.standard_normal((3, *shape)))
            self.pool.append(tensor)
            if kind == "vector" and self.random.random() < 0.4:
                self.pool.append(self.L.Discretization([-0.5, 0.1, 0.8], output_mode="one_hot")(tensor))

    def _grow(self) -> None:
        """One more value, or two of a layer that is called twice."""
        x = self.pool[int(self.random.integers(len(self.pool)))]
        kinds = {2: self._vector, 3: self._sequence, 4: self._image, 5: self._volume}[len(x.shape)]
        roll = self.random.random()
        if roll < 0.12:
            self.pool.append(self._joined(x))
        elif roll < 0.22:
            inner = self.keras.Input(x.shape[1:])
            nested = self.keras.Model(inner, self._one_of(kinds(inner)))
            self.pool += [nested(x), nested(self.K.negative(x) * 0.7)][: self.number(1, 2)]
        elif roll < 0.3:
            layer = self.L.Dense(self.number(2, 4), activation=self.pick("tanh", "relu"))
            self.pool += [layer(x), layer(x * 0.5)]
        elif roll < 0.36:
            self.pool.append(self._arithmetic(x))
        else:
            self.pool.append(self._one_of(kinds(x)))

    def _one_of(self, kinds: list[Callable[[], Value]]) -> Value:
        return self.pick(*kinds)()

    def _activated(self) -> Any:
        return self.pick(*ACTIVATIONS)

    def _arithmetic(self, x: Value) -> Value:
        K = self.K
        return self.pick(
            lambda: K.tanh(x) * x + 0.5,
            lambda: K.maximum(x, 0.1) - K.square(x) / 3,
            lambda: K.where(K.greater(x, 0.2), x, K.sin(x)),
            lambda: K.concatenate([x, K.abs(x)], axis=self.pick(1, -1)),
            lambda: x - K.mean(x, axis=-1, keepdims=True),
            lambda: K.exp(-K.square(x)),
        )()

    def _joined(self, x: Value) -> Value:
        """Two values of one shape as one."""
        L = self.L
        same = [v for v in self.pool if v.shape == x.shape]
        y = self.pick(*same)
        kind = self.pick("Add", "Multiply", "Subtract", "Average", "Maximum", "Concatenate")
        options = {"axis": self.pick(1, -1)} if kind == "Concatenate" else {}
        return getattr(L, kind)(**options)([x, y * 0.9])

    def _axis(self) -> int:
        return -1 if self.layout == "channels_last" else 1

    def _sides(self, x: Value) -> tuple[int, ...]:
        """The pixels of an image or volume."""
        return tuple(x.shape[1:-1] if self.layout == "channels_last" else x.shape[2:])

    def _channels(self, x: Value) -> int:
        return int(x.shape[self._axis()])

    def _window(self, x: Value) -> dict[str, Any]:
        """Sizes for a convolution or pool that leave something."""
        least = min(self._sides(x))
        kernel = self.number(1, max(1, min(4, least - 1)))
        found = {"padding": self.pick("same", "valid"), "strides": self.number(1, 3)}
        return found | {"kernel_size": kernel, "data_format": self.layout}

    def _convolved(self, x: Value, rank: int) -> Value:
        options = self._window(x)
        if options["strides"] == 1 and self.random.random() < 0.4 and 2 * options["kernel_size"] <= min(self._sides(x)):
            options["dilation_rate"] = 2
        groups = self.pick(1, self._channels(x))
        filters = groups * self.number(1, 3)
        kind = getattr(self.L, f"Conv{rank}D")
        return kind(filters, activation=self._activated(), groups=groups, use_bias=self.pick(True, False), **options)(x)

    def _pooled(self, x: Value, rank: int, kind: str) -> Value:
        options = self._window(x)
        options["pool_size"] = options.pop("kernel_size")
        return getattr(self.L, f"{kind}Pooling{rank}D")(**options)(x)

    def _transposed(self, x: Value, rank: int) -> Value:
        options = self._window(x)
        return getattr(self.L, f"Conv{rank}DTranspose")(self.number(1, 3), activation=self._activated(), **options)(x)

    def _image(self, x: Value) -> list[Callable[[], Value]]:
        L, axis, f = self.L, self._axis(), {"data_format": self.layout}
        return [
            lambda: self._convolved(x, 2),
            lambda: self._convolved(x, 2),
            lambda: self._transposed(x, 2),
            lambda: self._pooled(x, 2, "Max"),
            lambda: self._pooled(x, 2, "Average"),
            lambda: L.DepthwiseConv2D(self.number(1, 3), depth_multiplier=self.number(1, 2), padding="same", **f)(x),
            lambda: L.SeparableConv2D(self.number(1, 4), self.number(1, 3), padding="same", **f)(x),
            lambda: L.BatchNormalization(axis=axis, scale=self.pick(True, False))(x),
            lambda: L.GroupNormalization(self.pick(1, self._channels(x)), axis=axis)(x),
            lambda: L.LayerNormalization()(x),
            lambda: L.UpSampling2D((self.number(1, 2), 2), interpolation=self.pick("nearest", "bilinear"), **f)(x),
            lambda: L.ZeroPadding2D(((self.number(0, 2), 1), (0, self.number(0, 2))), **f)(x),
            lambda: L.Resizing(self.number(4, 9), self.number(4, 9), self.pick("nearest", "bilinear"),
                               crop_to_aspect_ratio=self.pick(True, False), **f)(x),
            lambda: L.CenterCrop(self.number(3, 9), self.number(3, 9), **f)(x),
            lambda: L.Rescaling(1 / 3, 0.2)(x),
            lambda: L.PReLU(alpha_initializer="ones", shared_axes=self.pick(None, [1, 2]))(x),
            lambda: x * L.Conv2D(self._channels(x), 1, activation="sigmoid", **f)(
                self.pick(L.GlobalAveragePooling2D, L.GlobalMaxPooling2D)(keepdims=True, **f)(x)
            ),
            lambda: self.pick(L.GlobalAveragePooling2D, L.GlobalMaxPooling2D)(**f)(x),
            lambda: L.Reshape((-1, int(x.shape[-1])))(x),
            lambda: L.TimeDistributed(L.Dense(2, activation="tanh"))(L.Permute((2, 3, 1))(x)),
            lambda: L.Dense(self.number(2, 5))(L.Flatten()(x)),
        ]  # fmt: skip

    def _volume(self, x: Value) -> list[Callable[[], Value]]:
        L, f = self.L, {"data_format": self.layout}
        return [
            lambda: self._convolved(x, 3),
            lambda: self._transposed(x, 3) if max(self._sides(x)) < 8 else self._pooled(x, 3, "Max"),
            lambda: self._pooled(x, 3, self.pick("Max", "Average")),
            lambda: L.BatchNormalization(axis=self._axis())(x),
            lambda: L.ZeroPadding3D((0, 1, (1, 0)), **f)(x),
            lambda: L.GlobalAveragePooling3D(**f)(x),
            lambda: L.Reshape((int(x.shape[1]), -1, int(x.shape[-1])))(x),
        ]

    def _sequence(self, x: Value) -> list[Callable[[], Value]]:
        L, width = self.L, int(x.shape[-1])
        recurrent = self.pick(L.LSTM, L.GRU, L.SimpleRNN)
        options = {"return_sequences": self.pick(True, False), "use_bias": self.pick(True, False)}
        seven = min(7, int(x.shape[1]))
        return [
            lambda: recurrent(self.number(2, 4), go_backwards=self.pick(True, False), **options)(x[:, :seven]),
            lambda: L.Bidirectional(recurrent(3, **options), merge_mode=self.pick("concat", "sum"))(x[:, :seven]),
            lambda: L.Conv1D(self.number(1, 4), self.number(1, 3), padding=self.pick("same", "causal"))(x),
            lambda: L.MultiHeadAttention(self.number(1, 3), self.number(2, 4))(x, x, use_causal_mask=self.pick(0, 1)),
            lambda: L.LayerNormalization(center=self.pick(True, False))(x),
            lambda: L.BatchNormalization()(x),
            lambda: L.EinsumDense("abc,cd->abd", (None, 3), bias_axes="d", activation=self._activated())(x),
            lambda: self.pick(L.MaxPooling1D, L.AveragePooling1D)(2, padding="same")(x),
            lambda: L.UpSampling1D(2)(x) if x.shape[1] < 20 else L.Dense(width)(x),
            lambda: self.pick(L.GlobalAveragePooling1D, L.GlobalMaxPooling1D)()(x),
            lambda: L.Permute((2, 1))(x),
            lambda: L.Softmax(axis=self.pick(1, -1))(x),
            lambda: L.Dot(axes=2, normalize=self.pick(True, False))([x, L.Dense(width)(x)]),
        ]

    def _vector(self, x: Value) -> list[Callable[[], Value]]:
        L = self.L
        return [
            lambda: L.Dense(self.number(2, 5), activation=self._activated())(x),
            lambda: L.BatchNormalization()(L.Dense(4)(x)),
            lambda: L.RMSNormalization()(x),
            lambda: L.RepeatVector(self.number(2, 4))(x),
            lambda: L.Normalization(mean=0.3, variance=2.0)(x),
            lambda: L.Dot(axes=1, normalize=True)([L.Dense(3)(x), L.Dense(3)(x)]),
        ]

    def _end(self, x: Value) -> Value:
        """An output that depends on weights."""
        return self.L.Dense(2)(x)


def drawn_model(keras: Any, seed: int) -> tuple[Any, list[Any]]:
    """A model and a batch for it; the same for the same seed."""
    return Drawn(keras, seed).model()
