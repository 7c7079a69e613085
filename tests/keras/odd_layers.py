"""Programs around ``fit`` whose models have layers of every kind, and layers of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.keras.drawn_fits import TORCH
from tests.keras.fit_program import (
    GOALS,
    IMAGES,
    RANDOM_X,
    SEQUENCES,
    TOKENS,
    K,
    L,
    dense,
    fit,
    images,
    keras,
    program,
)


class Sampling(L.Layer):
    """Draws around a mean, and adds a divergence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, inputs: Any) -> Any:
        mean, scale = inputs
        self.add_loss(-0.05 * K.mean(scale - K.square(mean) - K.exp(scale) + 1))
        return mean + K.exp(0.5 * scale) * keras.random.normal(K.shape(mean), dtype=mean.dtype, seed=self.seeds)


@program
def a_variational_autoencoder(manage: Any) -> Any:
    given = keras.Input((6,))
    x = L.Dense(5, activation="relu")(given)
    z = Sampling()([L.Dense(2)(x), L.Dense(2)(x)])
    return fit(keras.Model(given, L.Dense(6)(L.Dense(5, activation="relu")(z))), manage, y=RANDOM_X)


@program
def noise_of_every_kind(manage: Any) -> Any:
    kinds = [L.GaussianNoise(0.2), L.GaussianDropout(0.2), L.AlphaDropout(0.1), L.Dropout(0.3, seed=5)]
    x = given = keras.Input((6,))
    for kind in kinds:
        x = L.Dense(5)(kind(x))
    return fit(keras.Model(given, L.Dense(2)(x)), manage)


@program
def a_state_from_batch_to_batch(manage: Any) -> Any:
    given = keras.Input(batch_shape=(4, 5, 3))
    x = L.GRU(4, stateful=True, return_sequences=True)(given)
    model = keras.Model(given, L.Dense(2)(L.LSTM(3, stateful=True)(x)))
    found = fit(model, manage, SEQUENCES, shuffle=False)
    for layer in model.layers[1:3]:
        layer.reset_state()
    return [*found, *model.predict(SEQUENCES, batch_size=4, verbose=0)]


@program
def masks_from_words_to_the_loss(manage: Any) -> Any:
    tokens = keras.Input((5,), dtype="int32")
    x = L.Embedding(7, 4, mask_zero=True)(tokens)
    x = L.Bidirectional(L.LSTM(3, return_sequences=True, recurrent_dropout=0.2))(x)
    model = keras.Model(tokens, L.TimeDistributed(L.Dense(3))(L.Dropout(0.2)(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return fit(model, manage, TOKENS, TOKENS % 3, loss, metrics=["accuracy"], weighted_metrics=["accuracy"])


@program
def a_mask_that_a_layer_makes(manage: Any) -> Any:
    given = keras.Input((5, 3))
    x = L.Masking(-9.0)(given)
    x = L.GRU(4, return_sequences=True, go_backwards=True)(x) + L.LSTM(4, return_sequences=True)(x)
    x = L.MultiHeadAttention(2, 2)(x, x)
    data = SEQUENCES.copy()
    data[:, 3:] = -9.0
    return fit(keras.Model(given, L.Dense(2)(L.GlobalAveragePooling1D()(x))), manage, data)


@program
def weights_that_a_function_reads(manage: Any) -> Any:
    """Words and their scores share a table, which a Lambda takes from around it."""
    tokens = keras.Input((5,), dtype="int32")
    table = L.Embedding(7, 4)
    x = L.Dense(4, activation="tanh")(table(tokens))
    scores = L.Lambda(lambda v: K.matmul(v, K.transpose(table.embeddings)))(x)
    model = keras.Model(tokens, L.Activation("linear")(scores))
    return fit(model, manage, TOKENS, TOKENS, keras.losses.SparseCategoricalCrossentropy(from_logits=True))


@program
def weights_that_an_operation_reads(manage: Any) -> Any:
    tokens = keras.Input((5,), dtype="int32")
    table = L.Embedding(7, 4)
    x = L.Dense(4, activation="tanh")(table(tokens))
    model = keras.Model(tokens, K.matmul(x, K.transpose(K.convert_to_tensor(table.embeddings)))) if TORCH else None
    if model is None:
        model = keras.Model(tokens, table(K.argmax(x, axis=-1)) + x)
        return fit(model, manage, TOKENS, np.ones((8, 5, 4)))
    return fit(model, manage, TOKENS, TOKENS, keras.losses.SparseCategoricalCrossentropy(from_logits=True))


@program
def constraints_and_penalties(manage: Any) -> Any:
    options = {"kernel_constraint": keras.constraints.MaxNorm(0.5), "bias_regularizer": "l2"}
    return fit(dense(kernel_regularizer="l1", activity_regularizer="l2", **options), manage)


@program
def a_power_iteration_in_every_step(manage: Any) -> Any:
    return fit(dense(L.SpectralNormalization(L.Dense(5), power_iterations=2)), manage)


@program
def pictures_that_are_flipped(manage: Any) -> Any:
    return fit(images(L.RandomFlip(seed=3), L.Conv2D(4, 3, activation="relu"), L.Dropout(0.1)), manage, IMAGES)


@program
def words_as_strings(manage: Any) -> Any:
    if TORCH:
        return fit(dense(), manage)
    import tensorflow as tf

    words = keras.Input((3,), dtype="string")
    x = L.Embedding(5, 4)(L.StringLookup(vocabulary=["a", "b", "c"])(words))
    model = keras.Model(words, L.Dense(2)(L.Flatten()(x)))
    data = tf.constant(np.array([["a", "b", "z"], ["c", "c", "a"]] * 4))
    return fit(model, manage, data)


@program
def an_adapted_normalization(manage: Any) -> Any:
    layer = L.Normalization()
    layer.adapt(RANDOM_X)
    given = keras.Input((6,))
    return fit(keras.Model(given, L.Dense(2)(L.Dense(5, activation="relu")(layer(given)))), manage)


@program
def low_rank_updates(manage: Any) -> Any:
    model = dense()
    for layer in model.layers[1:3]:
        layer.enable_lora(2)
    return fit(model, manage)


class Cell(L.Layer):
    """A recurrent cell of one's own."""

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(**options)
        self.units = self.state_size = self.output_size = units

    def build(self, shape: Any) -> None:
        self.inner = self.add_weight(shape=(shape[-1] + self.units, self.units), name="inner")

    def call(self, x: Any, states: Any) -> Any:
        new = K.tanh(K.matmul(K.concatenate([x, states[0]], -1), self.inner))
        return new, [new]


@program
def cells_of_its_own_and_stacked(manage: Any) -> Any:
    given = keras.Input((5, 3))
    x = L.RNN([L.LSTMCell(4, dropout=0.2), Cell(3)], return_sequences=True)(given)
    return fit(keras.Model(given, L.Dense(2)(L.RNN(Cell(4))(x))), manage, SEQUENCES)


@program
def a_normalization_at_every_step_of_a_sequence(manage: Any) -> Any:
    frame = keras.Sequential([keras.Input((8, 3)), L.Conv1D(4, 3), L.BatchNormalization(), L.Flatten()])
    given = keras.Input((8, 8, 3))
    return fit(keras.Model(given, L.Dense(2)(L.LSTM(3)(L.TimeDistributed(frame)(given)))), manage, IMAGES)


@program
def images_over_time(manage: Any) -> Any:
    given = keras.Input((3, 6, 6, 2))
    x = L.ConvLSTM2D(3, 3, padding="same", return_sequences=True, dropout=0.1)(given)
    model = keras.Model(given, L.Dense(2)(L.GlobalAveragePooling3D()(x)))
    return fit(model, manage, np.random.default_rng(0).standard_normal((8, 3, 6, 6, 2)))


class Counting(L.Layer):
    """Has a state of its own, and a metric."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")
        self.mean = keras.metrics.Mean(name="size")

    def call(self, x: Any, training: bool | None = None) -> Any:
        if training:
            self.seen.assign_add(1.0)
        self.mean.update_state(K.mean(K.abs(x)))
        return x * (1 + 0.1 * self.seen)


@program
def a_layer_that_counts_its_calls(manage: Any) -> Any:
    return fit(dense(Counting()), manage)


class Running(L.Layer):
    """Takes off a running mean that it has just brought up to date: no gradient goes through the mean."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * K.mean(x, axis=0))
        return x - self.mean


@program
def a_layer_that_reads_what_it_has_assigned(manage: Any) -> Any:
    given = keras.Input((6,))
    x = Running()(L.Dense(5, activation="relu")(L.Dense(7, activation="tanh")(given)))
    return fit(keras.Model(given, L.Dense(2)(Running()(L.Dense(5, activation="relu")(x)))), manage)


@program
def in_half_precision(manage: Any) -> Any:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    model = images(L.Conv2D(4, 3, activation="relu"), L.BatchNormalization(), L.Conv2D(4, 3))
    return fit(model, manage, IMAGES.astype("float32"), GOALS.astype("float32"), epochs=3)


@program
def layers_of_other_types(manage: Any) -> Any:
    given = keras.Input((6,))
    x = L.Dense(5, activation="relu", dtype="float32")(given)
    return fit(keras.Model(given, L.Dense(2, dtype="float64")(L.BatchNormalization(dtype="float32")(x))), manage)


@program
def channels_first(manage: Any) -> Any:
    given = keras.Input((3, 8, 8))
    f = {"data_format": "channels_first"}
    if not TORCH:  # TensorFlow has no such convolution on a CPU
        x = L.BatchNormalization(axis=1)(L.UpSampling2D(2, **f)(given))
    else:
        x = L.BatchNormalization(axis=1)(L.Conv2D(4, 3, **f)(given))
    model = keras.Model(given, L.Dense(2)(L.GlobalAveragePooling2D(**f)(x)))
    return fit(model, manage, IMAGES.transpose(0, 3, 1, 2))
