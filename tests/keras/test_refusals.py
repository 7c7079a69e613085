"""What a twin cannot carry is refused, however deep it is, and what it can is that of Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import outcore
import outcore.keras
from outcore.errors import ModelError
from tests.keras.oracle import compare, keras

L, K = keras.layers, keras.ops
SERIES, IMAGE = (5, 4), (8, 8, 3)


def model_of(*layers: Any, shape: tuple[int, ...] = (6,)) -> Any:
    x = given = keras.Input(shape)
    for layer in layers:
        x = layer(x, x) if isinstance(layer, L.MultiHeadAttention) else layer(x)
    return keras.Model(given, x)


PENALIZED = {
    "the cell of an LSTM": lambda **how: [L.LSTM(3, **how)],
    "the cell of a GRU": lambda **how: [L.GRU(3, **how)],
    "both directions": lambda **how: [L.Bidirectional(L.GRU(3, **how))],
    "an attention": lambda **how: [L.MultiHeadAttention(2, 2, **how)],
    "every step": lambda **how: [L.TimeDistributed(L.Dense(3, **how))],
    "a separable convolution": lambda **how: [
        L.SeparableConv1D(3, 2, **{k.replace("kernel", "pointwise"): v for k, v in how.items()})
    ],
    "a model inside": lambda **how: [model_of(L.LSTM(3, **how), shape=SERIES)],
}


@pytest.mark.parametrize("place", PENALIZED)
def test_penalties_and_constraints_are_refused_wherever_they_are(place: str) -> None:
    make = PENALIZED[place]
    for how, said in (
        ({"kernel_regularizer": "l2"}, "kernel has a regularizer"),
        ({"kernel_constraint": "unit_norm"}, "kernel has a constraint"),
        ({"activity_regularizer": "l2"}, "activity regularizer"),
    ):
        with pytest.raises(ModelError, match=said):
            outcore.keras.to_torch(model_of(*make(**how), shape=SERIES))
    outcore.keras.to_torch(model_of(*make(), shape=SERIES))


class Weighted(keras.Model):  # type: ignore[misc]
    """A class with a weight of its own that is penalized."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.add_weight(shape=(6,), initializer="ones", regularizer="l2", name="scale")

    def call(self, x: Any) -> Any:
        return x * self.scale


class Alone(keras.Model):  # type: ignore[misc]
    """A class that computes with a weight before an input comes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.add_weight(shape=(6,), initializer="ones", name="scale")
        self.last = L.Dense(2)

    def call(self, x: Any) -> Any:
        return self.last(x * K.softmax(self.scale)) + K.sum(x * self.scale, axis=-1, keepdims=True)


class AloneLayer(L.Layer):  # type: ignore[misc]
    """The same of a layer."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        return x * K.cast(self.scale, x.dtype) + x * self.scale


class Marking(L.Layer):  # type: ignore[misc]
    """Masks what is small."""

    supports_masking = True

    def call(self, x: Any) -> Any:
        return x * 2

    def compute_mask(self, x: Any, mask: Any = None) -> Any:
        return K.any(K.abs(x) > 1, -1)


def built(kind: Any) -> Any:
    model = kind()
    model(np.zeros((2, 6)))
    return model


class Scaled(keras.Model):  # type: ignore[misc]
    """A functional model whose ``call`` does more than its graph."""

    def call(self, x: Any, training: bool | None = None, mask: Any = None) -> Any:
        return super().call(x, training=training) * 3.0


class Steep(keras.Model):  # type: ignore[misc]
    """One whose ``call`` does more in training alone, where no comparison of outputs sees it."""

    def call(self, x: Any, training: bool | None = None, mask: Any = None) -> Any:
        return super().call(x, training=training) * (3.0 if training else 1.0)


class SteepChain(keras.Sequential):  # type: ignore[misc]
    """The same of a sequential model."""

    def call(self, x: Any, training: bool | None = None, mask: Any = None) -> Any:
        return super().call(x, training=training) * (3.0 if training else 1.0)


class Chain(keras.Sequential):  # type: ignore[misc]
    """A sequential model whose ``call`` does more than its layers."""

    def call(self, x: Any, training: bool | None = None, mask: Any = None) -> Any:
        return super().call(x, training=training) * 3.0


def subclass(kind: Any) -> Any:
    if issubclass(kind, keras.Sequential):
        return kind([keras.Input((6,)), L.Dense(6)])
    inner = model_of(L.Dense(6))
    return kind(inner.input, inner.output)


REFUSED = {
    "a weight of the model itself": (lambda: built(Weighted), "weighted/scale has a regularizer"),
    "a weight that a class computes with alone": (lambda: built(Alone), "computes with alone/scale alone"),
    "one that a layer computes with": (lambda: model_of(AloneLayer()), "computes with .*scale alone"),
    "outputs with a mask": (lambda: model_of(L.Dense(3), Marking(), shape=SERIES), "output 0 of .* has a mask"),
    "statistics of every step": (
        lambda: model_of(L.TimeDistributed(model_of(L.Dense(3), L.BatchNormalization(), shape=(4,))), shape=SERIES),
        "normalizes every step by its own statistics",
    ),
    "a call that does more in training": (lambda: subclass(Steep), "branches on training"),
    "the same inside of a model": (lambda: model_of(subclass(Steep), L.Dense(2)), "branches on training"),
    "the same of a sequential model": (lambda: subclass(SteepChain), "branches on training"),
    "a sequential one inside": (lambda: model_of(subclass(SteepChain), L.Dense(2)), "branches on training"),
    "an activation without weights yet": (lambda: model_of(L.Dense(3, activation=L.PReLU())), "no weights yet"),
    "layers of two types": (lambda: model_of(L.Dense(3, dtype="float32")), "in float32 and .* in float64"),
    "a layer without weights of another": (
        lambda: model_of(L.Dense(3), L.Activation("tanh", dtype="float32")),
        "activation computes in float32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_twin_would_lose_is_refused(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(ModelError, match=said):
        outcore.keras.to_torch(make())


def test_a_weight_that_a_class_computes_with_alone_is_no_constant_under_a_budget() -> None:
    """It was that of the moment of planning, and was not trained."""
    with pytest.raises(ModelError, match="computes with alone/scale alone"):
        outcore.within(built(Alone), [(4, 6)], memory=None, quiet=True)


CARRIED = {
    "a call that does more": lambda: subclass(Scaled),
    "one inside of a model": lambda: model_of(subclass(Scaled), L.Dense(2)),
    "a sequential one": lambda: subclass(Chain),
    "frozen statistics in every step": lambda: model_of(L.TimeDistributed(frozen_chain()), L.Dense(2), shape=SERIES),
    "a column that is as wide as channels": lambda: column(),
    "a batch that is declared": lambda: declared(),
}


def frozen_chain() -> Any:
    inner = model_of(L.Dense(3), L.BatchNormalization(), shape=(4,))
    inner.trainable = False
    return inner


def column() -> Any:
    """Of two samples, Keras on TensorFlow takes the column for a bias of the two channels."""
    given = keras.Input((6,))
    x = L.Dense(4)(given)
    return keras.Model(given, L.Dense(3)(L.Dense(2)(x) + K.sum(x, axis=-1, keepdims=True)))


def declared() -> Any:
    given = keras.Input(batch_shape=(2, 6))
    return keras.Model(given, L.Dense(3)(given))


@pytest.mark.parametrize("name", CARRIED)
def test_what_a_twin_can_carry_is_that_of_keras(name: str) -> None:
    compare(CARRIED[name](), steps=2, batch=2 if "declared" in name else 5)


def test_what_a_frozen_model_does_not_train_its_twin_does_not() -> None:
    """A layer that is thawed inside of a frozen model normalizes by the batch, and its weights stay."""
    layer = L.BatchNormalization()
    model = model_of(L.Conv2D(3, 3), layer, shape=IMAGE)
    model.trainable = False
    layer.trainable = True
    assert not model.trainable_variables
    twin = outcore.keras.to_torch(model)
    assert not [name for name, p in twin.named_parameters() if p.requires_grad]


class SGD(keras.optimizers.SGD):  # type: ignore[misc]
    """Has the name of Keras' own, and does something else."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(-gradient, variable, learning_rate)


def test_optimizers_that_torch_has_no_counterpart_of_are_refused() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    spared = keras.optimizers.AdamW(0.01)
    spared.exclude_from_weight_decay(var_names=["bias"])
    by_weight = keras.optimizers.AdamW(0.01)
    by_weight.exclude_from_weight_decay(var_list=[keras.Variable(np.ones(2))])
    for optimizer, said in ((SGD(0.1), "class of its own"), (spared, "spares some"), (by_weight, "spares some")):
        with pytest.raises(ModelError, match=said):
            outcore.keras.optimizer_of(optimizer, parameters)
    untouched = keras.optimizers.AdamW(0.01)
    untouched.exclude_from_weight_decay()
    assert outcore.keras.optimizer_of(untouched, parameters).defaults["weight_decay"] == 0.004
