"""Keras models on TensorFlow in tiles: outputs and gradients of plain Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import outcore
import outcore.keras
from outcore.errors import ModelError
from tests.keras.oracle import error, keras, scrambled, tf
from tests.keras.test_convert import unet
from tests.keras.test_tensorflow_plan import cut

L = keras.layers


def frozen(model: Any) -> Any:
    """With batch normalization that keeps its statistics."""
    for layer in model._flatten_layers():
        if isinstance(layer, L.BatchNormalization):
            layer.trainable = False
    return scrambled(model)


def residual(size: Any = None, top: bool = True) -> Any:
    """A ResNet: a strided stem with a pool, two stages, the second with a strided shortcut."""
    given = keras.Input((size, size, 3))
    x = L.Conv2D(4, 7, strides=2, padding="same", use_bias=False)(given)
    x = L.MaxPooling2D(3, strides=2, padding="same")(L.ReLU()(L.BatchNormalization()(x)))
    for width, stride in ((4, 1), (6, 2)):
        y = L.ReLU()(L.BatchNormalization()(L.Conv2D(width, 3, strides=stride, padding="same", use_bias=False)(x)))
        y = L.BatchNormalization()(L.Conv2D(width, 3, padding="same")(y))
        short = x if stride == 1 and x.shape[-1] == width else L.Conv2D(width, 1, strides=stride)(x)
        x = L.Activation("relu")(L.Add()([y, short]))
    return keras.Model(given, L.Dense(3)(L.GlobalAveragePooling2D()(x)) if top else x)


def odd() -> Any:
    """Average pools at borders, dilation, depthwise and separable kernels, padding, cropping, transposed kernels."""
    given = keras.Input((None, None, 3))
    x = L.AveragePooling2D(3, strides=2, padding="same")(L.Conv2D(4, 3, dilation_rate=2, padding="same")(given))
    x = L.DepthwiseConv2D(3, strides=2, padding="same")(L.ZeroPadding2D(((1, 2), (0, 9)))(x))
    x = L.Conv2DTranspose(3, 3, strides=2, padding="same")(L.SeparableConv2D(4, 3, activation="elu")(x))
    x = L.Cropping2D(((1, 0), (2, 1)))(L.Conv2DTranspose(3, 4, strides=3)(x))
    return keras.Model(given, L.Dense(2)(L.LayerNormalization()(keras.ops.tanh(x) * 2.0)))


def step(model: Any, x: Any, weight: Any = None) -> tuple[Any, list[Any]]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = model(x, training=True)
        loss = tf.reduce_sum(tf.square(out) * (1.0 if weight is None else weight))
    return out, list(tape.gradient(loss, [x, *(v.value for v in model.trainable_variables)]))


CASES = [(unet, (1, 24, 32, 2), 16), (residual, (2, 61, 48, 3), (3, 2)), (odd, (1, 29, 34, 3), (9, 14))]


def compare(build: Any, shape: Any, tile: Any) -> None:
    model = frozen(build())
    x = tf.constant(np.random.default_rng(0).standard_normal(shape))
    want, gradients = step(model, x)
    outcore.keras.stream(model, tile=tile)
    have, found = step(model, x)
    assert model.__dict__["call"].tiles_run >= 4
    assert error(want, have) < 1e-10
    for a, b in zip(gradients, found, strict=True):
        assert error(a, b) < 1e-10
    outcore.release(model)
    assert "call" not in model.__dict__


@pytest.mark.parametrize(("build", "shape", "tile"), CASES)
def test_tiles_have_the_outputs_and_gradients_of_the_whole(build: Any, shape: Any, tile: Any) -> None:
    tf.config.run_functions_eagerly(True)  # tracing takes longer than running, at this size
    try:
        compare(build, shape, tile)
    finally:
        tf.config.run_functions_eagerly(False)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "shape", "tile"), CASES)
def test_traced_tiles_have_the_outputs_and_gradients_of_the_whole(build: Any, shape: Any, tile: Any) -> None:
    compare(build, shape, tile)


def test_an_eager_tape_keeps_nothing_of_tiles_and_of_recomputed_segments() -> None:
    """Between forward and backward there are the outputs, and for segments what goes from one to the next."""
    given = keras.Input((None, None, 4))
    x = given
    for _ in range(6):
        x = L.Conv2D(4, 3, padding="same", activation="tanh")(x)
    model, image = keras.Model(given, x), tf.constant(np.random.default_rng(0).random((1, 128, 128, 4)))
    held = []
    tf.config.run_functions_eagerly(True)
    try:
        for change in (
            lambda: None,
            lambda: outcore.keras.stream(model, tile=64),
            lambda: cut(model, [3]),
        ):
            change()
            before = tf.config.experimental.get_memory_info("CPU:0")["current"]
            with tf.GradientTape() as tape:
                out = model(image, training=True)
            held.append(
                (tf.config.experimental.get_memory_info("CPU:0")["current"] - before)
                // (image.shape.num_elements() * 8)
            )
            del tape, out
    finally:
        tf.config.run_functions_eagerly(False)
    plain, streamed, segments = held
    assert plain >= 6 and streamed <= 2 and segments <= 3, held


class Classed(keras.Model):  # type: ignore[misc]
    """Two convolutions, written as a class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = L.Conv2D(4, 3, padding="same", activation="tanh"), L.Conv2D(2, 3, padding="same")

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


def test_a_class_runs_in_tiles() -> None:
    model, x = Classed(), tf.constant(np.random.default_rng(0).standard_normal((1, 20, 24, 3)))
    want = model(x)
    outcore.keras.stream(model, tile=8)
    assert error(want, model(x)) < 1e-10 and model.__dict__["call"].tiles_run == 9


def test_what_depends_on_all_pixels_is_refused() -> None:
    given = keras.Input((None, None, 3))
    model = keras.Model(given, L.BatchNormalization()(given))
    outcore.keras.stream(model, tile=8)
    with pytest.raises(ModelError, match="batch_normalization"):
        model(tf.zeros((1, 16, 16, 3), tf.float64), training=True)


def window(size: int, start: int, stop: int) -> Any:
    """A weight that is one in a square and zero around it."""
    weight = np.zeros((1, size, size, 1), keras.config.floatx())
    weight[:, start:stop, start:stop] = 1
    return weight


def in_float64(model: Any, build: Any) -> Any:
    """The same model in float64, with the weights of one in float32."""
    kind = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    made = frozen(build())
    made.set_weights([w.astype("float64") for w in model.get_weights()])
    keras.config.set_floatx(kind)
    keras.config.set_dtype_policy(kind)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
@pytest.mark.parametrize("name", ["unet", "residual"])
def test_an_image_of_8192_pixels_in_tiles(name: str, backend: str) -> None:
    """Against plain Keras in float64 on a crop: the gradient of a loss on a window depends on its surroundings alone.

    The U-Net is in float32. On torch its tiles are within 2e-6 of float64. TensorFlow, without tiles too, rounds the
    gradient of the last bias, a sum over all pixels, by up to 1e-4: there tiles may be as far off as plain Keras is.
    """
    width = 4 if backend == "tensorflow" else 2  # of the U-Net: a core takes minutes
    build = (lambda: unet(width=width)) if name == "unet" else (lambda: residual(top=False))
    if name == "unet":  # the ResNet in float64: in float32 oneDNN ends the process in backward, in plain Keras as well
        keras.config.set_floatx("float32")
    model = frozen(build())
    kind = np.dtype(keras.config.floatx())
    channels, factor = (2, 1) if name == "unet" else (3, 8)
    size, side, margin = 8192, 256, 256
    first, last = (size - side) // 2, (size + side) // 2
    x = np.random.default_rng(0).standard_normal((1, size, size, channels), dtype=kind.type)
    crop = x[:, first - margin : last + margin, first - margin : last + margin]
    kept = slice(margin // factor, (margin + side) // factor)
    small = window((side + 2 * margin) // factor, kept.start, kept.stop)
    want, gradients = step(in_float64(model, build), tf.constant(crop, "float64"), tf.constant(small, "float64"))
    roughly = step(model, tf.constant(crop), tf.constant(small))[1] if kind == np.float32 else gradients
    inside, tile = slice(first // factor, last // factor), 1024
    if backend == "tensorflow":
        outcore.keras.stream(model, tile=tile // factor)  # of the output; below, of the input
        with tf.GradientTape() as tape:
            out = model(tf.constant(x), training=True)
            loss = tf.reduce_sum(tf.square(out[:, inside, inside]))
        found = [np.asarray(g) for g in tape.gradient(loss, [v.value for v in model.trainable_variables])]
    else:
        twin = outcore.keras.to_torch(model).train()
        streamed = outcore.stream.stream(twin, tile=tile)
        out = streamed(torch.from_numpy(x))
        out[:, inside, inside].square().sum().backward()
        out, state = out.detach(), twin.state_dict(keep_vars=True)
        arrays = {id(v): np.zeros(tuple(v.shape), kind) for v in model.weights}
        for entry in twin.carried:
            if state[entry.name].grad is not None:
                entry.into_keras(state[entry.name].grad, arrays[id(model.weights[entry.index])])
        found = [arrays[id(v)] for v in model.trainable_variables]
    assert tuple(out.shape[1:3]) == (size // factor, size // factor)
    exact = kind == np.float64
    off = error(want[:, kept, kept], out[:, inside, inside])
    have = max(error(a, b) for a, b in zip(gradients[1:], found, strict=True))
    rounding = max(error(a, b) for a, b in zip(gradients[1:], roughly[1:], strict=True))
    print(f"tiles: output {off:.1e}, gradients {have:.1e}; plain Keras: gradients {rounding:.1e}")
    assert off < (1e-10 if exact else 1e-5)
    assert have < (1e-10 if exact else max(1e-5, 2 * rounding if backend == "tensorflow" else 0))
