"""Keras models on TensorFlow within a budget: the weights of plain training, and the peak that was predicted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import outcore
import outcore.keras
from outcore.errors import ModelError, OutcoreError, PlanError
from outcore.keras.symbolic import functional_of
from outcore.keras.tensorflow.calls import list_calls
from outcore.keras.tensorflow.graph_memory import graph_memory
from outcore.keras.tensorflow.optimized_graph import optimized
from outcore.keras.tensorflow.segments import Segment, SegmentedCall
from tests.keras.living_bytes import living_bytes
from tests.keras.measured_memory import MODELS, rows
from tests.keras.oracle import keras, tf
from tests.keras.random_models import random_model
from tests.keras.test_convert import residual_class

L = keras.layers


def network() -> Any:
    """Dropout, batch normalization, a layer and a nested model that are called twice."""
    keras.utils.set_random_seed(0)
    inner = keras.Sequential(
        [keras.Input((None, None, 4)), L.Conv2D(4, 3, padding="same"), L.BatchNormalization(), L.ReLU(), L.Dropout(0.3)]
    )
    given = keras.Input((8, 8, 3))
    x = L.Conv2D(4, 3, padding="same", activation="relu")(given)
    for number in range(3):
        x = L.Add()([x, inner(x) if number < 2 else L.BatchNormalization()(L.Conv2D(4, 1)(x))])
        x = L.Dropout(0.2)(x)
    return keras.Model(given, L.Dense(3)(L.GlobalAveragePooling2D()(x)))


def cut(model: Any, places: list[int], kept: tuple[int, ...] = ()) -> Any:
    """The same model by segments; all but some are run again."""
    calls = list_calls(keras, model)
    ends = [0, *[p for p in places if 0 < p < len(calls.calls)], len(calls.calls)]
    segments = [Segment(a, b, n not in kept) for n, (a, b) in enumerate(pairwise(ends))]
    model.__dict__["call"] = SegmentedCall(keras, functional_of(keras, model), calls, segments)
    return model


def gradients(model: Any, x: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        out = tf.nest.flatten(model(x, training=True))
        loss = tf.add_n([tf.reduce_mean(tf.square(o)) for o in out])
    return list(tape.gradient(loss, [v.value for v in model.trainable_variables]))


def same(a: Any, b: Any, within: float) -> bool:
    arrays = [(np.asarray(p, "float64"), np.asarray(q, "float64")) for p, q in zip(a, b, strict=True)]
    return all(float(np.abs(p - q).max(initial=0)) <= within for p, q in arrays)


def test_a_segment_that_runs_again_has_the_same_gradients_masks_and_statistics_bit_for_bit() -> None:
    x = tf.constant(np.random.default_rng(0).standard_normal((4, 8, 8, 3)))
    plain, again = network(), cut(network(), [2, 6, 11], kept=(0,))
    for _ in range(2):
        assert same(gradients(plain, x), gradients(again, x), 0.0)
    assert same([v.value for v in plain.variables], [v.value for v in again.variables], 0.0)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_frozen_weights_of_what_runs_again_stay_as_they_are(policy: str) -> None:
    before, after = keras.config.dtype_policy(), []
    keras.config.set_dtype_policy(policy)
    try:
        for again in (False, True):
            keras.utils.set_random_seed(1)
            given = keras.Input((6,))
            frozen = L.Dense(5, activation="tanh")
            model = keras.Model(given, L.Dense(3)(frozen(L.Dense(4)(given))))
            frozen.trainable = False
            held = [np.array(v) for v in frozen.weights]
            model = cut(model, [2]) if again else model
            x = tf.constant(np.random.default_rng(0).standard_normal((4, 6)), model.input.dtype)
            assert all(g is not None for g in gradients(model, x))
            assert all((np.array(v) == h).all() for v, h in zip(frozen.weights, held, strict=True))
            after.append([tf.cast(g, "float64") for g in gradients(model, x)])
    finally:
        keras.config.set_dtype_policy(before)
    assert same(*after, 1e-12)


def fitted(model: Any, eager: bool = False) -> list[Any]:
    random = np.random.default_rng(0)
    x, y = random.standard_normal((6, *model.input_shape[1:])), random.standard_normal((6, 3))
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", jit_compile=False, run_eagerly=eager)
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [keras.ops.convert_to_numpy(v) for v in model.variables]


def small() -> Any:
    keras.utils.set_random_seed(0)
    x = given = keras.Input((16, 16, 3))
    for _ in range(3):
        x = L.Dropout(0.2)(L.BatchNormalization()(L.Conv2D(4, 3, padding="same", activation="relu")(x)))
    return keras.Model(given, L.Dense(3)(L.GlobalAveragePooling2D()(x)))


def test_fit_within_a_budget_trains_the_weights_of_plain_fit() -> None:
    model = outcore.within(small(), [(4, 16, 16, 3)], memory="92%", quiet=True)
    plan = outcore.memory_plan(model)
    assert any(recompute for *_, recompute in plan.segments) and plan.peak_bytes <= 0.92 * plan.plain_bytes
    assert same(fitted(small()), fitted(model), 1e-10)
    outcore.release(model)
    assert "call" not in model.__dict__ and "make_train_function" not in model.__dict__


def test_a_trial_leaves_the_model_and_what_it_is_compiled_with_as_they_were() -> None:
    keras.config.set_floatx("float32")
    model = small()
    known = [keras.ops.convert_to_numpy(v).copy() for v in model.variables]
    own = keras.metrics.MeanAbsoluteError()
    model.compile("adam", "mse", metrics=["mse", own])
    optimizer, loss = model.optimizer, model._compile_loss
    outcore.within(model, [(4, 16, 16, 3)], memory="2GiB", quiet=True)
    assert outcore.memory_plan(model).peak_bytes < 2**31
    assert same(known, model.variables, 0.0)
    assert model.optimizer is optimizer and not optimizer.built and model._compile_loss is loss and not loss.built
    assert float(own.total) == 0.0
    model.fit(np.zeros((4, 16, 16, 3)), np.zeros((4, 3)), verbose=0)  # targets of another type than were tried


def test_trials_leave_no_memory_behind() -> None:
    """Traced functions hold the variables of tried optimizers: 8 MiB for every plan that was looked at, here."""
    keras.config.set_floatx("float32")
    given = keras.Input((1024,))
    model = keras.Model(given, L.Dense(1024)(given))
    model.compile("adam", "mse")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    outcore.within(model, [(1, 1024)], memory="2GiB", quiet=True)
    assert tf.config.experimental.get_memory_info("CPU:0")["current"] - before < 2**20


def test_memory_is_read_off_the_graph_that_runs() -> None:
    model = small()
    variables = [v.value for v in model.trainable_variables]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        return tape.gradient(loss, variables)

    traced = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec((4, 16, 16, 3), tf.float64))
    found = optimized(traced)
    assert len(found.get_operations()) < len(traced.graph.get_operations())
    memory = graph_memory(found)
    assert memory.unknown == [] and memory.peak_bytes > 6 * 4 * 16 * 16 * 4 * 8  # inputs of norms and of dropouts
    looped = tf.function(lambda x: tf.while_loop(lambda n: n < 9.0, lambda n: [n + 1.0], [x]), autograph=False)
    loop = looped.get_concrete_function(tf.TensorSpec((), tf.float32))
    assert optimized(loop) is loop.graph


@pytest.mark.slow
def test_a_nested_model_within_a_budget_trains_the_weights_of_plain_fit() -> None:
    model = outcore.within(network(), [(4, 8, 8, 3)], memory="90%", quiet=True)
    assert outcore.memory_plan(model).peak_bytes <= 0.9 * outcore.memory_plan(model).plain_bytes
    assert any(recompute for *_, recompute in outcore.memory_plan(model).segments)
    assert same(fitted(network()), fitted(model), 1e-10)


@pytest.mark.slow
def test_a_model_written_as_a_class_trains_within_a_budget() -> None:
    x = tf.constant(np.random.default_rng(0).standard_normal((4, 6, 6, 3)))
    plain, model = residual_class(), residual_class()
    outcore.within(model, (x,), memory="97%", quiet=True)
    assert any(recompute for *_, recompute in outcore.memory_plan(model).segments)
    assert same(gradients(plain, x), gradients(model, x), 1e-14)
    assert same([plain(x)], [model(x)], 0.0)


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_refused() -> None:
    with pytest.raises(PlanError, match="smallest peak found"):
        outcore.within(network(), [(4, 8, 8, 3)], memory="1%", quiet=True)


def test_what_cannot_be_planned_is_refused() -> None:
    class Own(keras.Model):
        def call(self, x: Any) -> Any:
            return tf.sin(x)

    own = Own()
    own(tf.zeros((4, 8)))
    with pytest.raises(ModelError, match="symbolic tensors"):
        outcore.within(own, [(4, 8)], memory="1GiB")
    with pytest.raises(OutcoreError, match="takes an input of shape"):
        outcore.within(network(), [(4, 9, 8, 3)], memory="1GiB")
    with pytest.raises(OutcoreError, match="TensorFlow"):
        outcore.within(network(), [(4, 8, 8, 3)], memory="1GiB", stream=True)


def test_a_model_for_batches_of_one_size_is_not_split() -> None:
    """A stateful layer raised in the midst of planning, where its batch was tried in parts."""
    given = keras.Input(batch_shape=(4, 3, 2))
    model = keras.Model(given, L.Dense(2)(L.LSTM(2, stateful=True, unroll=True, name="memory")(given)))
    with pytest.raises(OutcoreError, match="micro-batches: memory is stateful"):
        outcore.keras.within(model, [(4, 3, 2)], memory=None, micro_batches=2)
    with pytest.raises(PlanError, match="smallest peak found") as refused:
        outcore.within(model, [(4, 3, 2)], memory=1, quiet=True)
    assert "micro_batches=" not in str(refused.value)
    sized = keras.Model(given, L.Dense(2)(given))
    with pytest.raises(OutcoreError, match="declared with a batch of 4"):
        outcore.keras.within(sized, [(4, 3, 2)], memory=None, micro_batches=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_random_models_by_random_segments(seed: int) -> None:
    """Masks, recurrent layers, several inputs, shared layers: the same gradients but for the order of sums."""
    plain, inputs = random_model(keras, seed)
    again, _ = random_model(keras, seed)
    random = np.random.default_rng(seed)
    number = len(list_calls(keras, again).calls)
    places = sorted(random.choice(range(1, number), size=min(number - 1, 4), replace=False).tolist())
    cut(again, places, kept=tuple(random.choice(5, 1).tolist()))
    given: Any = [tf.constant(x) for x in inputs]
    given = given if len(given) > 1 else given[0]
    for _ in range(2):
        a, b = gradients(plain, given), gradients(again, given)
        for p, q in zip(a, b, strict=True):
            assert (p is None) == (q is None)
            if p is not None:
                largest = float(tf.reduce_max(tf.abs(tf.convert_to_tensor(p))))
                assert same([tf.convert_to_tensor(p)], [tf.convert_to_tensor(q)], 1e-14 * max(1.0, largest))
    assert same([v.value for v in plain.variables], [v.value for v in again.variables], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_peaks_are_predicted_and_budgets_kept(name: str) -> None:
    keras.config.set_floatx("float32")
    for row in rows(name):
        print(row)
        if row.get("budget_bytes") is not None:
            assert row["measured_bytes"] <= row["budget_bytes"], row


def test_a_peak_is_the_largest_over_what_a_process_may_have_done_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is given as it is unless it is twice as large, so it matters where free memory lies."""
    sizes = [int(n) for n in np.random.default_rng(0).integers(5, 40, 40)]

    def step(x: Any) -> Any:
        kept, total = [tf.tile(x, [n]) for n in sizes], tf.constant(0.0)  # of 64 KiB each
        for one in kept[::-1]:
            total += tf.reduce_sum(tf.sin(one))
        return total

    traced = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec((2**14,), tf.float32))
    found, again = (graph_memory(traced.graph, [3 * 2**18] * 4) for _ in range(2))
    assert found == again
    monkeypatch.setattr("outcore.keras.tensorflow.graph_memory._HISTORIES", 0)
    fresh = graph_memory(traced.graph, [3 * 2**18] * 4)
    assert fresh.spread_bytes == 0 < found.spread_bytes and found.peak_bytes > fresh.peak_bytes
    assert fresh.peak_bytes >= 4 * 3 * 2**18 + sum(sizes) * 2**16


def test_living_bytes_are_those_that_were_asked_for() -> None:
    def run() -> None:
        large = tf.zeros((3 * 2**20,), tf.uint8)
        small = tf.zeros((2**20,), tf.uint8)
        del large
        again = tf.zeros((2 * 2**20,), tf.uint8)  # in a chunk of three, if that is free
        del small, again

    before = int(tf.config.experimental.get_memory_info("CPU:0")["current"])
    found = living_bytes(run) - before
    assert 4 * 2**20 <= found < 4 * 2**20 + 2**17
