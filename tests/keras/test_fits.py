"""Programs with ``fit``, odd ones and drawn ones, under outcore against plain Keras, on both backends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outcore.keras.tensorflow.calls import list_calls, traced_functional
from outcore.keras.tensorflow.planned import _specs
from outcore.keras.tensorflow.traced import step_facts
from tests.keras.odd_fits import PROGRAMS, Counting, compare, dense
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


@pytest.mark.parametrize("name", ["a_layer_that_counts_its_calls"])
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
