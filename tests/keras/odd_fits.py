"""Programs around ``fit`` as users write them beside the tutorials; each runs on every backend of Keras.

A program is a function of `manage`, which puts a model under outcore or leaves it alone, and returns numbers. Run as
plain Keras and under outcore they have to be the same.

    KERAS_BACKEND=torch python -m tests.keras.odd_fits [name ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from outcore.errors import OutcoreError
from outcore.keras.installed import require_keras
from tests.keras.drawn_fits import TORCH, difference, segmented, stepped, within_some

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


@program
def class_weights(manage: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return fit(dense(out=3), manage, y=CLASSES, loss=loss, class_weight={0: 1.0, 1: 3.0, 2: 0.2}, metrics=["accuracy"])


@program
def named_outputs_of_which_one_has_no_loss(manage: Any) -> Any:
    given = keras.Input((6,), name="given")
    x = L.Dense(5, activation="tanh")(given)
    model = keras.Model({"given": given}, {"a": L.Dense(2)(x), "b": L.Dense(2)(x), "c": L.Dense(1)(x)})
    goals = {"a": GOALS, "b": GOALS * 2}
    weights = {"a": np.linspace(0, 1, 8), "b": np.ones(8)}
    return fit(model, manage, {"given": RANDOM_X}, goals, {"a": "mse", "b": "mae"}, sample_weight=weights)


@program
def callbacks_that_read_and_write(manage: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        back = [
            keras.callbacks.ModelCheckpoint(f"{folder}/best.weights.h5", save_weights_only=True, monitor="val_loss"),
            keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=10.0),
            keras.callbacks.TerminateOnNaN(),
            keras.callbacks.CSVLogger(f"{folder}/log.csv"),
            keras.callbacks.BackupAndRestore(f"{folder}/backup"),
        ]
        model = dense()
        found = fit(model, manage, callbacks=back, validation_data=(RANDOM_X, GOALS), epochs=3)
        model.load_weights(f"{folder}/best.weights.h5")
        rows = np.genfromtxt(f"{folder}/log.csv", delimiter=",", skip_header=1)
        return [*found, *numbers(model), rows]


@program
def several_steps_at_once(manage: Any) -> Any:
    return fit(dense(L.Dropout(0.3)), manage, steps_per_execution=1 if TORCH else 2)


@program
def compiled_by_xla(manage: Any) -> Any:
    return fit(dense(), manage, jit_compile=not TORCH)


@program
def run_eagerly(manage: Any) -> Any:
    model = images(L.Conv2D(4, 3), L.BatchNormalization(), L.Dropout(0.2), L.Conv2D(4, 3, activation="relu"))
    return fit(model, manage, IMAGES, run_eagerly=True)


@program
def endless_data_with_steps(manage: Any) -> Any:
    model = dense()
    model.compile("adam", "mse")
    manage(model, RANDOM_X[:4])

    def data() -> Any:
        while True:
            for start in (0, 4, 3):
                yield RANDOM_X[start : start + 4], GOALS[start : start + 4]

    return numbers(model, *history(model.fit(data(), steps_per_epoch=4, epochs=2, verbose=0)))


@program
def a_training_step_of_its_own(manage: Any) -> Any:
    inner = dense(L.Dropout(0.2))
    return fit(stepped(keras.Model)(inner.input, inner.output), manage)


@program
def a_loss_and_metrics_of_its_own(manage: Any) -> Any:
    class Own(keras.Model):
        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *more: Any, **how: Any) -> Any:
            return K.mean(K.square(y - y_pred)) + 0.1 * K.mean(K.abs(y_pred))

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return super().compute_metrics(x, y, y_pred, sample_weight) | {"largest": K.max(y_pred)}

    inner = dense()
    return fit(Own(inner.input, inner.output), manage)


@program
def tests_and_predictions_of_its_own(manage: Any) -> Any:
    class Own(keras.Model):
        def test_step(self, data: Any) -> Any:
            x, y = data[:2]
            return {"far": K.mean(K.abs(y - self(x, training=False)))}

        def predict_step(self, data: Any) -> Any:
            return 2 * super().predict_step(data)

    inner = dense(L.Dropout(0.3))
    return fit(Own(inner.input, inner.output), manage, validation_data=(RANDOM_X, GOALS))


@program
def two_models_in_one_that_train_each_other(manage: Any) -> Any:
    """A GAN, as Keras' guide has it: both inner models are under outcore."""
    keras.utils.set_random_seed(3)
    maker = keras.Sequential([keras.Input((6,)), L.Dense(5, activation="relu"), L.Dense(2)])
    judge = keras.Sequential([keras.Input((2,)), L.Dense(5, activation="relu"), L.Dense(1)])
    for model, x in ((maker, RANDOM_X), (judge, GOALS)):
        model.compile(keras.optimizers.Adam(0.01), "mse")
        manage(model, x[:4])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    for start in (0, 4, 0):
        real, noise = GOALS[start : start + 4], RANDOM_X[start : start + 4]
        made = maker.predict_on_batch(noise)
        judge.train_on_batch(
            np.concatenate([real, made])[::2], np.concatenate([np.ones((4, 1)), np.zeros((4, 1))])[::2]
        )
        _step(maker, lambda x: loss(K.ones((4, 1)), judge(maker(x, training=True), training=False)), noise)
    return [*numbers(maker), *numbers(judge)]


def _step(model: Any, loss_of: Any, x: Any) -> None:
    """One step of a loop of one's own."""
    x = K.convert_to_tensor(x)
    variables = model.trainable_variables
    if TORCH:
        import torch

        model.zero_grad()
        loss_of(x).backward()
        with torch.no_grad():
            model.optimizer.apply([v.value.grad for v in variables], variables)
        return
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = loss_of(x)
    model.optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)


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
def a_frozen_base_in_evaluation_then_thawed(manage: Any) -> Any:
    base = images(L.Conv2D(4, 3, activation="relu"), L.BatchNormalization(), L.Dropout(0.3), out=5)
    base.trainable = False
    given = keras.Input((8, 8, 3))
    model = keras.Model(given, L.Dense(2)(L.Dropout(0.2)(base(given, training=False))))
    first = fit(model, manage, IMAGES)
    base.trainable = True
    model.compile(keras.optimizers.Adam(0.001), "mse", jit_compile=False)
    again = history(model.fit(IMAGES, GOALS, batch_size=4, verbose=0))
    return [*first, *numbers(model, *again)]


@program
def gradients_added_up_and_averaged_weights(manage: Any) -> Any:
    optimizer = keras.optimizers.AdamW(0.01, gradient_accumulation_steps=3, use_ema=True, ema_momentum=0.8)
    return fit(dense(), manage, optimizer=optimizer, epochs=3)


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
def a_model_that_calls_other_models(manage: Any) -> Any:
    class Outer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = dense(out=6), dense(L.BatchNormalization())
            self.drop = L.Dropout(0.3)

        def call(self, x: Any, training: bool | None = None) -> Any:
            return self.second(self.drop(self.first(x) + x, training=training), training=training)

    model = Outer()
    model(RANDOM_X[:4])
    return fit(model, manage)


@program
def a_sequential_model_that_is_built_by_fit(manage: Any) -> Any:
    model = keras.Sequential([L.Dense(5, activation="relu"), L.Dropout(0.2), L.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    keras.utils.set_random_seed(2)
    model.fit(RANDOM_X, GOALS, batch_size=4, verbose=0)
    return fit(model, manage)


@program
def saved_and_loaded_in_between(manage: Any) -> Any:
    model = dense(L.BatchNormalization())
    first = fit(model, manage)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/a.keras")
        again = keras.models.load_model(f"{folder}/a.keras")
        model.save_weights(f"{folder}/b.weights.h5")
        copied = keras.models.clone_model(model)
        copied.load_weights(f"{folder}/b.weights.h5")
        assert Path(f"{folder}/a.keras").exists()
    more = history(again.fit(RANDOM_X, GOALS, batch_size=4, shuffle=False, verbose=0))
    return [*first, *numbers(again, *more), copied.predict(RANDOM_X, verbose=0)]


@program
def batches_by_hand(manage: Any) -> Any:
    model = dense(L.Dropout(0.2))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], jit_compile=False)
    manage(model, RANDOM_X[:4])
    keras.utils.set_random_seed(3)
    logs = [model.train_on_batch(RANDOM_X[n : n + 4], GOALS[n : n + 4], return_dict=False) for n in (0, 4, 2, 5)]
    model.reset_metrics()
    return numbers(model, *logs, model.test_on_batch(RANDOM_X, GOALS))


@program
def a_loop_of_its_own(manage: Any) -> Any:
    model = images(L.Conv2D(4, 3), L.BatchNormalization(), L.Dropout(0.2))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    manage(model, IMAGES[:4])
    keras.utils.set_random_seed(3)
    for start in (0, 4):
        _step(model, lambda x: K.mean(K.square(model(x, training=True))), IMAGES[start : start + 4])
    return numbers(model)


@program
def gradients_of_the_input(manage: Any) -> Any:
    """A penalty on them would need gradients of gradients; this one does not."""
    model = images(L.Conv2D(4, 3, activation="tanh"), L.Conv2D(4, 3))
    manage(model, IMAGES[:4])
    x = K.convert_to_tensor(IMAGES[:4])
    if TORCH:
        x = x.clone().requires_grad_()
        K.sum(model(x, training=True)).backward()
        return [x.grad.numpy(), *numbers(model)]
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(x)
        made = tf.reduce_sum(model(x, training=True))
    return [np.asarray(tape.gradient(made, x)), *numbers(model)]


@program
def two_models_over_the_same_layers(manage: Any) -> Any:
    given = keras.Input((6,))
    base = L.Dense(5, activation="relu")(given)
    one, other = keras.Model(given, L.Dense(2)(base)), keras.Model(given, L.Dense(2)(L.Dropout(0.2)(base)))
    return [*fit(one, manage), *fit(other, manage), *fit(one, manage)]


@program
def a_wider_batch_than_planned(manage: Any) -> Any:
    return fit(images(L.Conv2D(4, 3), L.BatchNormalization()), manage, IMAGES, batch_size=8)


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


def under_outcore(model: Any, example: Any) -> None:
    """Under outcore, so that something runs again."""
    if TORCH:
        within_some(model, example, ("70%", "90%", "300%"))
        return
    segmented(model, example, np.random.default_rng(0), 1)


def compare(name: str) -> dict[str, Any]:
    """How far a program under outcore is from plain Keras."""
    found = []
    for manage in (lambda model, example: None, under_outcore):
        keras.backend.clear_session()
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        keras.utils.set_random_seed(1)
        try:
            found.append([np.array(x, "float64") for x in PROGRAMS[name](manage)])
        except OutcoreError as error:
            return {"name": name, "refused": str(error)}
        except Exception as error:
            return {
                "name": name,
                "failed" if found else "plain": f"{type(error).__name__}: {str(error)[:600]}",
                "where": traceback.format_exc()[-1800:],
            }
    return {"name": name, "differs by": difference(*found)}


if __name__ == "__main__":
    for one in sys.argv[1:] or PROGRAMS:
        print(json.dumps(compare(one)), flush=True)
