"""Whole models: shared and nested layers, several inputs and outputs, operations, and what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import outcore.keras
from outcore.errors import ModelError
from outcore.keras.twin import leaves
from tests.keras.oracle import compare, compare_gradients, error, keras, scrambled, tf

L = keras.layers
K = keras.ops


def unet(rank: int = 2, width: int = 4, size: int | None = None) -> Any:
    """A U-Net with two levels."""
    conv, up = getattr(L, f"Conv{rank}D"), getattr(L, f"UpSampling{rank}D")
    transpose = getattr(L, f"Conv{rank}DTranspose")

    def pool(x: Any) -> Any:  # TensorFlow has no pooling of volumes in float64
        return L.MaxPooling2D(2)(x) if rank == 2 else L.Conv3D(2, 2, strides=2)(x)

    def block(x: Any, channels: int) -> Any:
        for _ in range(2):
            x = L.ReLU()(L.BatchNormalization()(conv(channels, 3, padding="same", use_bias=False)(x)))
        return x

    given = keras.Input((*[size] * rank, 2))
    first = block(given, width)
    second = block(pool(first), 2 * width)
    x = block(pool(second), 4 * width)
    x = block(L.Concatenate()([transpose(2 * width, 2, strides=2, padding="same")(x), second]), 2 * width)
    x = block(L.Concatenate()([up(2)(x), first]), width)
    return keras.Model(given, conv(3, 1, activation="softmax")(x), name=f"unet{rank}d")


def transformer() -> Any:
    """Two layers, the second causal; heads of 4, because Keras rounds the scale of others to float32."""
    tokens = keras.Input((7,), dtype="int32")
    x = L.Embedding(13, 8)(tokens) + L.Embedding(7, 8)(K.arange(7))
    for causal in (False, True):
        y = L.LayerNormalization()(x)
        x = x + L.MultiHeadAttention(2, 4)(y, y, use_causal_mask=causal)
        y = L.Dense(16, activation="silu")(L.LayerNormalization()(x))
        x = x + L.Dropout(0.1)(L.Dense(8)(y))
    return keras.Model(tokens, L.Dense(3)(x[:, 0]))


def shared() -> Any:
    """A layer and a model that are called twice, two inputs, two outputs."""
    tower = keras.Sequential([keras.Input((8, 8, 3)), L.Conv2D(4, 3, 2, "same"), L.BatchNormalization(), L.Flatten()])
    a, b = keras.Input((8, 8, 3), name="a"), keras.Input((8, 8, 3), name="b")
    dense = L.Dense(5, activation="tanh")
    left, right = dense(tower(a)), dense(tower(b))
    return keras.Model([a, b], [left * right, L.Dot(1)([left, right])])


def named() -> Any:
    a, b = keras.Input((4,), name="a"), keras.Input((5,), name="b")
    x = L.Concatenate()([L.Dense(3)(b), L.Dense(2)(a)])
    return keras.Model({"a": a, "b": b}, {"sum": K.sum(x, axis=-1), "all": x})


def frozen() -> Any:
    """A frozen base, called in evaluation, as in transfer learning."""
    base = keras.Sequential([keras.Input((8, 8, 3)), L.Conv2D(4, 3), L.BatchNormalization(), L.ReLU()])
    base.trainable = False
    given = keras.Input((8, 8, 3))
    return keras.Model(given, L.Dense(2)(L.GlobalAveragePooling2D()(base(given, training=False))))


def operations() -> Any:
    given = keras.Input((8, 6, 3))
    x = L.Conv2D(4, 3, padding="same")(given)
    x = K.concatenate([x, K.square(x) - 1.5, -x], axis=-1) / 3
    x = K.hard_sigmoid(x) * x + np.arange(12.0) + K.maximum(x, 0.1)
    x = K.where(K.greater(x, 2.0), K.sqrt(K.abs(x) + 1), x**2)
    y = K.mean(x, axis=(1, 2), keepdims=True) * x + K.pad(x[:, 1:-1], ((0, 0), (1, 1), (0, 0), (0, 0)))
    y = K.transpose(K.reshape(y, (-1, 48, 12)), (0, 2, 1))
    a, b = K.split(y, 2, axis=1)
    z = K.expand_dims(K.max(K.matmul(a, K.swapaxes(b, 1, 2)), axis=-1), 1)
    return keras.Model(given, [K.squeeze(z, 1), K.clip(K.stack([a, b], axis=1), -1, 1), K.softmax(K.std(y, axis=2))])


def states() -> Any:
    given = keras.Input((6, 3))
    sequence, h, c = L.LSTM(4, return_sequences=True, return_state=True)(given)
    x, g = L.GRU(4, return_state=True)(sequence, initial_state=h)
    return keras.Model(given, [L.LSTM(4)(sequence, initial_state=[h, c]), x, g])


def attention() -> Any:
    a, b = keras.Input((5, 6)), keras.Input((4, 6))
    x, scores = L.MultiHeadAttention(2, 4, value_dim=5, use_bias=False)(a, b, return_attention_scores=True)
    return keras.Model([a, b], [L.Attention(use_scale=True)([x, b]), L.AdditiveAttention()([a, b]), scores])


MODELS = {
    "unet-2d": lambda: unet(2, size=8),
    "unet-3d": lambda: unet(3, 2, size=8),
    "unet-any-size": lambda: unet(2),
    "transformer": transformer,
    "shared": shared,
    "named": named,
    "frozen": frozen,
    "operations": operations,
    "states": states,
    "attention": attention,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_carried_over_trained_and_carried_back(name: str) -> None:
    model = MODELS[name]()
    twin = compare(model, size=16)
    again = copy.deepcopy(pickle.loads(pickle.dumps(twin)))
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.mul_(1.1)
    outcore.keras.write_back(again, model)
    state = again.state_dict(keep_vars=True)
    for entry in again.carried:
        assert (
            error(entry.to_torch(keras.ops.convert_to_numpy(model.weights[entry.index])), state[entry.name].detach())
            == 0
        )


@pytest.mark.parametrize("kind", ["plain", "dropout", "scores"])
def test_a_query_that_may_attend_to_nothing_is_treated_as_in_keras(kind: str) -> None:
    """Padded positions: Keras attends to everything alike, or to nothing where it keeps the scores; never NaN."""
    x, mask = keras.Input((5, 8)), keras.Input((5, 5), dtype="bool")
    layer = L.MultiHeadAttention(2, 4, dropout=0.5 if kind == "dropout" else 0.0)
    made = layer(x, x, attention_mask=mask, return_attention_scores=kind == "scores")
    model = scrambled(keras.Model([x, mask], made))
    twin = outcore.keras.to_torch(model).eval()
    random = np.random.default_rng(0)
    given, allowed = random.standard_normal((2, 5, 8)), random.random((2, 5, 5)) > 0.4
    allowed[0, 1], allowed[1, :, 3:] = False, False
    masked = tf.constant(allowed)
    want = tf.nest.flatten(model([tf.constant(given), masked], training=False))
    tensor = torch.from_numpy(given).requires_grad_()
    have = list(leaves(twin(tensor, torch.from_numpy(allowed))))
    assert len(want) == len(have) and all(error(w, h.detach()) < 1e-12 for w, h in zip(want, have, strict=True))
    have[0].square().sum().backward()
    with tf.GradientTape() as tape:
        source = tf.constant(given)
        tape.watch(source)
        loss = tf.reduce_sum(tf.square(tf.nest.flatten(model([source, masked], training=False))[0]))
    assert tensor.grad is not None and error(tape.gradient(loss, source), tensor.grad) < 1e-12


def test_a_new_keras_model_is_made_of_a_twin() -> None:
    model = shared()
    made = outcore.keras.from_torch(outcore.keras.to_torch(model))
    inputs = [np.random.default_rng(k).random((2, 8, 8, 3)) for k in range(2)]
    for want, have in zip(model.predict(inputs, verbose=0), made.predict(inputs, verbose=0), strict=True):
        assert error(want, have) == 0


def test_the_twin_has_the_names_of_keras() -> None:
    model = unet(2, size=8)
    twin = outcore.keras.to_torch(model)
    assert list(twin._modules) == [layer.name for layer in model.layers if not isinstance(layer, L.InputLayer)]


def test_inputs_come_one_by_one_as_a_list_or_by_name() -> None:
    model = named()
    twin = outcore.keras.to_torch(model)
    a, b = torch.rand(2, 4, dtype=torch.float64), torch.rand(2, 5, dtype=torch.float64)
    for given in (twin(a, b), twin([a, b]), twin({"b": b, "a": a}), twin(a=a, b=b)):
        assert torch.equal(given["all"], twin(a, b)["all"])
    with pytest.raises(ModelError, match="takes 2 inputs"):
        twin(a)


class Own(L.Layer):
    def call(self, x: Any) -> Any:
        return x * 2


def own() -> Any:
    inner = keras.Sequential([keras.Input((3,)), L.Dense(3), Own(name="mine")], name="inner")
    return keras.Sequential([keras.Input((3,)), inner], name="outer")


class Branching(L.Layer):
    def call(self, x: Any, training: Any = None) -> Any:
        return x * 2 if training else x


class Drawing(L.Layer):
    def call(self, x: Any) -> Any:
        return x * keras.random.uniform((3,))


class Sloped(L.Layer):
    def call(self, x: Any, training: Any = None) -> Any:
        return keras.ops.leaky_relu(x, 0.1 if training else 0.3)


class Tallying(L.Layer):
    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.seen.assign_add(1.0)
        return x * 2


class Swapping(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="mine")
        self.first, self.second = L.Dense(2), L.Dense(2)

    def call(self, x: Any, training: Any = None) -> Any:
        a, b = self.first(x), self.second(x)
        return [a, b] if training else [b, a]


def swapping() -> Any:
    model = Swapping()
    model(np.zeros((2, 3)))
    return model


class Native(L.Layer):
    def call(self, x: Any) -> Any:
        return tf.sin(x)


REFUSED = {
    "branch": (lambda: [Branching(name="mine")], r"mine \(Branching\).*branches on training"),
    "draw": (lambda: [Drawing(name="mine")], r"mine \(Drawing\).*draws numbers"),
    "slope": (lambda: [Sloped(name="mine")], r"mine \(Sloped\).*branches on training"),
    "swap": (swapping, r"mine \(Swapping\).*branches on training"),
    "tally": (lambda: [Tallying(name="mine")], r"mine \(Tallying\).*changes variables"),
    "native": (lambda: [Native(name="mine")], r"mine \(Native\).*symbolic tensors.*KERAS_BACKEND=torch"),
    "regularizer": (lambda: [L.Dense(2, kernel_regularizer="l2")], "regularizer.*weight_decay"),
    "constraint": (lambda: [L.Dense(2, kernel_constraint="non_neg")], "constraint"),
    "random": (lambda: [L.RandomCrop(4, 4)], "data set"),
    "lambda": (lambda: [L.Lambda(lambda x: x + 1)], "Lambda"),
    "mixed": (lambda: [L.Dense(2, dtype="mixed_bfloat16")], "bfloat16.*autocast"),
    "masking": (lambda: [L.Reshape((8, 24)), L.Masking()], "mask"),
    "recurrent-dropout": (lambda: [L.Reshape((8, 24)), L.LSTM(2, dropout=0.5)], "dropout"),
    "bicubic": (lambda: [L.UpSampling2D(interpolation="bicubic")], "bicubic"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_over_is_named(name: str) -> None:
    make, message = REFUSED[name]
    made = make()
    model = keras.Sequential([keras.Input((8, 8, 3)), *made]) if isinstance(made, list) else made
    with pytest.raises(ModelError, match=message):
        outcore.keras.to_torch(model)


def test_a_layer_of_ones_own_is_carried_over_by_a_function() -> None:
    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    twin = outcore.keras.to_torch(own(), layers={Own: lambda layer: Double()})
    assert isinstance(twin.inner.mine, Double)


def test_a_wrong_module_is_found_by_the_check() -> None:
    with pytest.raises(ModelError, match="differs by"):
        outcore.keras.to_torch(own(), layers={Own: lambda layer: torch.nn.Identity()})


def test_weights_go_back_into_a_model_of_the_same_shape_only() -> None:
    twin = outcore.keras.to_torch(keras.Sequential([keras.Input((3,)), L.Dense(2)]))
    other = keras.Sequential([keras.Input((3,)), L.Dense(4)])
    before = [w.numpy().copy() for w in other.weights]
    with pytest.raises(ModelError, match=r"\(3, 2\).*\(3, 4\)"):
        outcore.keras.write_back(twin, other)
    assert all((a == b.numpy()).all() for a, b in zip(before, other.weights, strict=True))


def test_a_model_without_a_graph_is_answered() -> None:
    class Written(keras.Model):
        def call(self, x: Any) -> Any:
            return x

    with pytest.raises(ModelError, match="not built"):
        outcore.keras.to_torch(Written())
    with pytest.raises(ModelError, match="not built"):
        outcore.keras.to_torch(keras.Sequential([L.Dense(2)]))
    with pytest.raises(ModelError, match="Keras 3 model"):
        outcore.keras.to_torch(torch.nn.Linear(2, 2))


class Scaled(L.Layer):
    """A layer with a weight of its own and a layer inside."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner = L.Conv2D(4, 3, padding="same")

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")
        self.inner.build(shape)

    def call(self, x: Any) -> Any:
        return K.tanh(self.inner(x)) * self.scale


class Residual(keras.Model):
    """A model written as a class, with dropout that follows training, and a layer of its own called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = L.Conv2D(4, 3, padding="same"), Scaled()
        self.drop, self.norm, self.head = L.Dropout(0.4), L.BatchNormalization(), L.Dense(2)

    def call(self, x: Any, training: Any = None) -> Any:
        x = self.first(x)
        for _ in range(2):
            x = x + self.drop(self.block(x), training=training)
        return self.head(K.mean(self.norm(x), axis=(1, 2)))


def residual_class() -> Any:
    keras.utils.set_random_seed(0)
    model = Residual()
    model(np.zeros((2, 6, 6, 3)))
    return model


def test_a_model_written_as_a_class_is_carried_over_trained_and_carried_back() -> None:
    model = residual_class()
    twin = outcore.keras.to_torch(model)
    names = [name for name, _ in twin.named_parameters()]
    assert len([name for name in names if name.endswith(".scale")]) == 1 and len(names) == len(
        model.trainable_variables
    )
    x = np.random.default_rng(0).standard_normal((2, 6, 6, 3))
    model.drop.rate = 0.0
    twin = outcore.keras.to_torch(model).train()
    (twin(torch.from_numpy(x)) ** 2).mean().backward()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x, training=True) ** 2)
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    compare_gradients(model, twin, gradients, 1e-10)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1)
    outcore.keras.write_back(twin, model)
    assert error(model(x), twin.eval()(torch.from_numpy(x)).detach()) < 1e-10
