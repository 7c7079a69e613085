"""Programs around ``fit`` as users write them beside the tutorials; each runs on every backend of Keras.

Run as plain Keras and under outcore they have to return the same numbers (`fit_program`).

    KERAS_BACKEND=torch python -m tests.keras.odd_fits [name ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import tests.keras.odd_effects
import tests.keras.odd_layers  # noqa: F401  (both register their programs)
from outcore.errors import OutcoreError
from tests.keras.drawn_fits import TORCH, difference, segmented, stepped, within_some
from tests.keras.fit_program import (
    CLASSES,
    GOALS,
    IMAGES,
    PROGRAMS,
    RANDOM_X,
    K,
    L,
    dense,
    fit,
    history,
    images,
    keras,
    numbers,
    program,
)


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
