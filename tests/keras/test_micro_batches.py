"""Batches in parts on TensorFlow: the gradients of the whole batch, or a refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import outcore
import outcore.keras
from outcore.errors import OutcoreError, PlanError
from tests.keras.oracle import keras
from tests.keras.test_tensorflow_plan import fitted, same

L, K = keras.layers, keras.ops
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((6, 4)), RANDOM.uniform(0, 1, (6, 3))


def dense(*inner: Any) -> Any:
    keras.utils.set_random_seed(0)
    x = given = keras.Input((4,))
    for layer in (L.Dense(5, activation="tanh"), *inner, L.Dense(3, activation="softmax")):
        x = layer(x)
    return keras.Model(given, x)


def in_parts(model: Any, parts: int = 2) -> Any:
    return outcore.keras.within(model, [(6, 4)], memory=None, micro_batches=parts, quiet=True)


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_micro_batches_have_the_gradients_of_the_whole_batch(eager: bool) -> None:
    def build() -> Any:
        keras.utils.set_random_seed(0)
        given = keras.Input((8, 8, 3))
        x = L.Conv2D(4, 3, padding="same", activation="tanh", kernel_regularizer="l2")(given)
        return keras.Model(given, L.Dense(3)(L.Flatten()(x)))

    model = outcore.keras.within(build(), [(4, 8, 8, 3)], memory=None, micro_batches=3, quiet=True)
    assert same(fitted(build(), eager), fitted(model, eager), 1e-10)  # batches of 4 and of 2, which is less than 3


def a_sum(y: Any, z: Any) -> Any:
    return K.sum(K.square(y - z))


def a_mean(y: Any, z: Any) -> Any:
    return K.mean(K.square(y - z))


@pytest.mark.parametrize(
    ("loss", "y"),
    [
        (keras.losses.Dice(), Y),
        (keras.losses.MeanSquaredError(reduction="sum"), Y),
        (keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), Y),
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=-1), np.arange(6) % 3),
        (a_sum, Y),
    ],
    ids=["ratio", "sum", "weighted mean", "ignored class", "function"],
)
def test_a_loss_that_is_no_mean_over_samples_is_not_split(loss: Any, y: Any) -> None:
    model = dense()
    model.compile("sgd", loss, run_eagerly=True)
    with pytest.raises(OutcoreError, match=r"no mean over the samples.*cannot take micro-batches"):
        in_parts(model).fit(X, y, batch_size=6, sample_weight=np.linspace(0.1, 2, 6), verbose=0)


def trained(model: Any, loss: Any, **how: Any) -> list[Any]:
    model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), loss, run_eagerly=True)
    model.fit(X, how.pop("y", Y), batch_size=6, shuffle=False, verbose=0, **how)
    return [K.convert_to_numpy(v) for v in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize(("loss", "weights"), [(a_mean, None), ("mse", np.linspace(0, 2, 6))])
def test_means_are_split(loss: Any, weights: Any) -> None:
    """A function that returns one number is none where samples have weights: Keras multiplies it by their mean."""
    want, have = (trained(model, loss, sample_weight=weights) for model in (dense(), in_parts(dense())))
    assert same(want, have, 1e-12)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_what_no_loss_reaches_is_not_updated() -> None:
    """Decay of weights would change them, where gradients of parts are added up from zero."""

    def two() -> Any:
        keras.utils.set_random_seed(0)
        given = keras.Input((4,))
        return keras.Model(given, {"a": L.Dense(3)(given), "b": L.Dense(2)(given)})

    losses = {"a": "mse"}
    assert same(trained(two(), losses, y={"a": Y}), trained(in_parts(two()), losses, y={"a": Y}), 1e-12)


def test_the_losses_of_single_outputs_are_those_of_the_whole_batch() -> None:
    """Their means are made while the first step is traced; of six samples, four parts have one, two, one and two."""

    def two() -> Any:
        keras.utils.set_random_seed(0)
        given = keras.Input((4,))
        return keras.Model(given, {"a": L.Dense(3)(given), "b": L.Dense(2)(given)})

    def history(model: Any) -> list[Any]:
        model.compile("sgd", {"a": "mse", "b": "mae"}, loss_weights={"a": 0.3, "b": 2.0}, jit_compile=False)
        shown = model.fit(X, {"a": Y, "b": Y[:, :2]}, batch_size=6, epochs=2, shuffle=False, verbose=0).history
        assert set(shown) == {"loss", "a_loss", "b_loss"}
        return [np.array(values) for _, values in sorted(shown.items())]

    assert same(history(two()), history(in_parts(two(), 4)), 1e-12)


def test_a_class_is_split() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = dense()

        def call(self, x: Any) -> Any:
            return {"made": self.inner(x) * 2.0}

    def built() -> Any:
        model = Own()
        model(X[:1])
        return model

    losses = {"made": "mse"}
    assert same(trained(built(), losses, y={"made": Y}), trained(in_parts(built()), losses, y={"made": Y}), 1e-12)


def test_a_table_of_which_a_batch_reads_some_rows_is_split_for_plain_sgd_alone() -> None:
    """Adam squares the gradient of every reading of a row by itself, not their sum."""

    def words(optimizer: str = "sgd") -> Any:
        keras.utils.set_random_seed(0)
        tokens = keras.Input((4,), dtype="int32")
        model = keras.Model(tokens, L.Dense(3)(L.Flatten()(L.Embedding(9, 2)(tokens))))
        model.compile(optimizer, "mse", jit_compile=False)
        return model

    def weights(model: Any) -> list[Any]:
        model.fit(np.arange(24).reshape(6, 4) % 7, Y, batch_size=3, epochs=2, shuffle=False, verbose=0)
        return [K.convert_to_numpy(v) for v in model.variables]

    assert same(weights(words()), weights(in_parts(words())), 1e-6)
    with pytest.raises(OutcoreError, match=r"squares the gradient of every reading of a row of .*embeddings"):
        in_parts(words("adam"))


class Penalty(L.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(K.sum(K.square(x)))
        return x


class Spread(L.Layer):
    def call(self, x: Any) -> Any:
        return x + K.std(x, axis=0, keepdims=True)


class OwnLoss(keras.Model):
    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *more: Any, **how: Any) -> Any:
        return K.sum(y_pred)


def with_loss() -> Any:
    inner = dense()
    return OwnLoss(inner.input, inner.output)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: dense(Penalty(name="penalty")), "penalty adds a loss of its own"),
        (lambda: dense(Spread()), "depends on the other samples"),
        (with_loss, "compute_loss of its own"),
    ],
)
def test_a_model_that_is_not_the_same_in_parts_is_refused(make: Any, sentence: str) -> None:
    model = make()
    model.compile("sgd", "mse")
    with pytest.raises(OutcoreError, match=sentence):
        in_parts(model)


def test_a_model_that_is_not_the_same_in_parts_is_not_split_unasked() -> None:
    with pytest.raises(PlanError, match=r"smallest peak found is .* with 1 micro-batches"):
        outcore.within(dense(Spread()), [(6, 4)], memory=1, quiet=True)
    with pytest.raises(PlanError, match=r"micro_batches=2 \(functional\w*/norm then sees parts of the batch\)"):
        outcore.within(dense(L.BatchNormalization(name="norm")), [(6, 4)], memory=1, quiet=True)


@pytest.mark.parametrize(
    ("inner", "xla", "parts", "sentences"),
    [
        ((L.Dropout(0.3),), True, 1, ["not of XLA"]),
        ((L.Dropout(0.3),), False, 2, ["drawn for each micro-batch"]),
        ((L.Dropout(0.3),), False, 1, []),
        ((), True, 2, []),
    ],
    ids=["XLA", "parts", "the same", "none"],
)
def test_random_numbers_that_are_not_those_of_plain_fit_are_spoken_of(
    inner: Any, xla: bool, parts: int, sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """XLA draws others from the same seeds, and a mask for a part is none for the batch."""
    model = dense(*inner)
    model.compile("sgd", "mse", jit_compile=xla)
    outcore.keras.within(model, [(6, 4)], memory=None, micro_batches=parts)
    said = capsys.readouterr().err
    assert said.count("random numbers") == len(sentences) and all(one in said for one in sentences)
