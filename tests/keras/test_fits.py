"""Programs with ``fit``, odd ones and drawn ones, under outcore against plain Keras, on both backends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outcore
import outcore.keras
from outcore.errors import ModelError, OutcoreError
from outcore.keras.tensorflow.calls import list_calls, traced_functional
from outcore.keras.tensorflow.planned import _specs
from outcore.keras.tensorflow.traced import step_facts
from outcore.one_device.keras_fit import inputs_of, prepared
from tests.keras.drawn_fits import difference, segmented
from tests.keras.fit_program import GOALS, PROGRAMS, RANDOM_X, dense
from tests.keras.odd_effects import EFFECTS, with_effects
from tests.keras.odd_fits import compare
from tests.keras.odd_layers import Counting
from tests.keras.oracle import keras

ROOT = Path(__file__).parents[2]
L, K = keras.layers, keras.ops
REFUSED_BY_KERAS = {"torch": {"a_state_from_batch_to_batch"}, "tensorflow": set[str]()}
"""On torch, Keras changes the states in place that autograd needs."""


def recurrent() -> Any:
    given = keras.Input(batch_shape=(4, 5, 3))
    return keras.Model(given, L.Dense(2)(L.LSTM(3, stateful=True, name="odd", unroll=True)(given)))


def tied() -> Any:
    tokens = keras.Input((5,), dtype="int32")
    table = L.Embedding(7, 4)
    score = L.Lambda(lambda x: K.matmul(x, K.transpose(table.embeddings)), name="odd")
    return keras.Model(tokens, score(L.Dense(4)(table(tokens))))


def test_calls_that_change_or_read_what_is_not_their_own_are_not_run_again() -> None:
    """As functions of their own variables they lost a state, the kernel that they had scaled, or a gradient."""
    spectral = dense(L.SpectralNormalization(L.Dense(5), name="odd"))
    for model in (recurrent(), tied(), spectral, dense(Counting(name="odd"))):
        functional = traced_functional(keras, model)
        calls = list_calls(keras, model, functional)
        facts = step_facts(keras, model, _specs(model, functional, [(4, *model.input_shape[1:])]), calls)
        for call, fact in zip(calls.calls, facts.calls, strict=True):
            assert fact.pure == (not call.path.endswith("/odd")), call.path
    assert facts.changing.endswith("/odd")


@pytest.mark.parametrize("kind", EFFECTS)
def test_calls_that_do_more_than_return_a_value_are_not_run_again_nor_split_unasked(kind: Any) -> None:
    """`tf.nn.dropout` drew another mask in backward, and the gradients were those of neither."""
    model = with_effects(kind)
    functional = traced_functional(keras, model)
    calls = list_calls(keras, model, functional)
    facts = step_facts(keras, model, _specs(model, functional, [(4, 6)]), calls)
    for call, fact in zip(calls.calls, facts.calls, strict=True):
        assert fact.pure == ("/odd_" not in call.path), call.path
    assert "/odd_0" in facts.changing


class Chosen(keras.Model):  # type: ignore[misc]
    """A class whose ``call`` depends on attributes that a user may change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = L.Dense(5), L.Dense(5), L.Dense(2)
        self.scale, self.slope, self.twice, self.axis, self.training_mode = 2.0, 0.1, True, 0, None
        self.drop = L.Dropout(0.5)

    def call(self, x: Any) -> Any:
        x = K.leaky_relu(self.first(x) * self.scale, self.slope)
        x = self.drop(x, training=self.training_mode) if self.training_mode is not None else self.drop(x)
        x = self.second(x) if self.twice else x
        return K.cumsum(self.last(x), axis=self.axis)


def chosen() -> Any:
    model = Chosen()
    model(RANDOM_X[:4])
    return model


def stacked() -> Any:
    return keras.Sequential([keras.Input((6,)), L.Dense(6), L.Dense(2)])


def replaced(model: Any) -> None:
    model.pop()
    model.add(L.Dense(2))


CHANGES: dict[str, tuple[Any, Any]] = {
    "another number": (chosen, lambda m: setattr(m, "scale", 3.0)),
    "a setting of an operation": (chosen, lambda m: setattr(m, "slope", 0.3)),
    "a layer left out": (chosen, lambda m: setattr(m, "twice", False)),
    "another axis": (chosen, lambda m: setattr(m, "axis", 1)),
    "a mode that is said": (chosen, lambda m: setattr(m, "training_mode", False)),
    "a layer in the place of the last": (stacked, replaced),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed_after_planning_is_refused_and_not_trained_as_it_was(name: str) -> None:
    make, change = CHANGES[name]
    model = make()
    model.compile("sgd", "mse", run_eagerly=True)
    outcore.within(model, [(4, 6)], memory=None, quiet=True)
    model.train_on_batch(RANDOM_X[:4], GOALS[:4])
    change(model)
    with pytest.raises(ModelError, match=r"than when it was given to outcore; .* release"):
        model.train_on_batch(RANDOM_X[:4], GOALS[:4])
    assert "call" not in outcore.release(model).__dict__


def test_what_is_no_model_of_keras_3_or_is_not_built_is_refused_in_a_sentence() -> None:
    old = type("Sequential", (), {"__module__": "tf_keras.src.engine.sequential"})()
    for model, said in (
        (old, "a model of Keras 2, which cannot be carried over; build it with Keras 3"),
        (object(), "takes a torch module or a Keras 3 model; builtins.object is none"),
        (L.Dense(3, name="single"), r"single is a Dense; wrap it: keras.Sequential"),
        (keras.Sequential([L.Dense(3)]), "is not built; call it once on a batch"),
    ):
        with pytest.raises(ModelError, match=said):
            outcore.within(model, [(4, 6)], memory=None, quiet=True)
    with pytest.raises(ModelError, match="of Keras 2"):
        outcore.keras.to_torch(old)
    with pytest.raises(ModelError, match="is not built"), prepared(keras.Sequential([L.Dense(3)])):
        pass


@pytest.mark.parametrize("given", [[(4, 7)], [(4, 6, 3)], [(4, 6, 1, 1)], (np.zeros((4, 5)),), [{"a": (4, 7)}]])
def test_inputs_of_other_shapes_than_declared_are_refused_on_torch_too(given: Any) -> None:
    model = dense()
    if isinstance(given[0], dict):
        named = keras.Input((6,), name="a")
        model = keras.Model({"a": named}, L.Dense(2)(named))
    with pytest.raises(OutcoreError, match=r"takes an input of shape \(None, 6\); given was \(4, "):
        inputs_of(model, given)
    for fits in ([(4, 6)], [(4, 6, 1)], (np.zeros((9, 6)),)):
        inputs_of(dense(), fits)


def test_a_class_whose_call_takes_no_mode_is_run_by_its_plan_where_gradients_are_taken() -> None:
    """It was run as ever, over the budget that was promised."""
    found = []
    for managed in (False, True):
        keras.utils.set_random_seed(0)
        model = chosen()
        model.compile("sgd", "mse", run_eagerly=True)
        if managed:
            segmented(model, RANDOM_X[:4], np.random.default_rng(0), 1)
            call = model.__dict__["call"]
            runs, run = [], call.run
            call.run = lambda *args, runs=runs, run=run: (runs.append(args[1]), run(*args))[1]
        loss = model.train_on_batch(RANDOM_X[:4], GOALS[:4])
        found.append([loss, model.predict_on_batch(RANDOM_X[:4]), *model.get_weights()])
    assert runs == [None] and any(segment.recompute for segment in call.segments)
    assert difference(*([np.array(x) for x in one] for one in found)) < 1e-12


@pytest.mark.parametrize(
    "name", ["a_layer_that_counts_its_calls", "a_layer_that_reads_what_it_has_assigned", "low_rank_updates"]
)
def test_some_odd_programs_are_those_of_plain_keras(name: str) -> None:
    assert compare(name)["differs by"] < 1e-10


def shown(module: str, backend: str, *words: str) -> list[dict[str, Any]]:
    """The rows of a program in a process of its own: Keras has one backend in each."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *words]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=900, check=False)
    assert made.returncode == 0, made.stderr
    return [json.loads(line) for line in made.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_odd_programs_are_those_of_plain_keras(backend: str) -> None:
    rows = shown("tests.keras.odd_fits", backend)
    assert [row["name"] for row in rows] == list(PROGRAMS)
    assert {row["name"] for row in rows if "plain" in row} == REFUSED_BY_KERAS[backend]
    for row in rows:
        assert "plain" in row or row["differs by"] < 1e-9, row


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 80, 20))
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_drawn_programs_are_those_of_plain_keras_or_refused(backend: str, first: int) -> None:
    rows = shown("tests.keras.drawn_fits", backend, str(first), str(first + 20))
    assert len(rows) == 20 and not [row for row in rows if "failed" in row or "differs" in row]
