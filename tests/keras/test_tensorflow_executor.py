"""What threads do to memory on TensorFlow: slow gradients of kernels, and what waits for them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from outcore.keras.symbolic import functional_of
from outcore.keras.tensorflow.calls import list_calls
from outcore.keras.tensorflow.executor import Executor
from outcore.keras.tensorflow.segments import Segment, SegmentedCall
from tests.keras.oracle import error, keras, tf

L = keras.layers


def convolutions() -> Any:
    keras.utils.set_random_seed(0)
    x = given = keras.Input((6, 6, 3))
    for number in range(4):
        x = L.Conv2D(3, 3, padding="same", activation="tanh", name=f"conv_{number}")(x)
    return keras.Model(given, x)


def step(model: Any) -> Any:
    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    return tf.function(run, autograph=False).get_concrete_function(tf.TensorSpec((2, 6, 6, 3), tf.float64))


def test_every_operation_runs_once_after_its_inputs_and_a_slow_one_beside_others() -> None:
    operations = step(convolutions()).graph.get_operations()
    executor = Executor(operations)
    beside = 0
    for workers in (1, 2, 3):
        begun, ended, running = set[int](), set[int](), set[int]()
        for number, begins in executor.run(workers, random.Random(workers)):
            op = operations[number]
            if begins:
                assert number not in begun and all(operations.index(t.op) in ended for t in op.inputs)
                begun.add(number)
                running.add(number)
                slow = {n for n in running if operations[n].type == "Conv2DBackpropFilter"}
                beside += bool(slow and "Grad" in op.type)
            else:
                running.remove(number)
                ended.add(number)
            assert len(running) <= workers
        assert ended == set(range(len(operations)))
    assert beside


def test_a_segment_runs_again_when_all_gradients_of_a_kept_one_behind_it_are_made() -> None:
    plain, model = convolutions(), convolutions()
    want = step(plain)(tf.ones((2, 6, 6, 3), tf.float64))
    calls = list_calls(keras, model)
    segments = [Segment(0, 2, recompute=True), Segment(2, 4, ordered=True)]
    model.__dict__["call"] = SegmentedCall(keras, functional_of(keras, model), calls, segments)
    function = step(model)
    for a, b in zip(want, function(tf.ones((2, 6, 6, 3), tf.float64)), strict=True):
        assert error(np.asarray(a), np.asarray(b)) < 1e-14
    first, *_, kernel, bias = (tensor.op for tensor in function.graph.outputs)
    before, stack = set[Any](), [first]
    while stack:
        op = stack.pop()
        if op not in before:
            before.add(op)
            stack += [*(t.op for t in op.inputs), *op.control_inputs]
    made = {t.op for op in (kernel, bias) for t in op.inputs}  # what is returned passes an identity
    assert made <= before
