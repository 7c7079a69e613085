"""Weights in files under Keras' names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outcore.keras
from outcore.errors import ModelError
from tests.keras.oracle import error, keras, scrambled

L = keras.layers


def build() -> Any:
    given = keras.Input((6, 4))
    x = L.Bidirectional(L.GRU(3, return_sequences=True, name="gru"), name="both")(given)
    return keras.Model(given, L.Dense(2, name="head")(L.BatchNormalization(name="norm")(x)))


def test_weights_go_through_files_under_keras_names(tmp_path: Path) -> None:
    model = scrambled(build())
    x = np.random.default_rng(0).standard_normal((2, 6, 4))
    twin = outcore.keras.to_torch(model)
    want = model(x)
    files = [outcore.keras.save_weights(twin, tmp_path / name) for name in ("a.safetensors", "a.weights.h5")]
    other = build()
    assert error(want, other(x)) > 1e-3
    outcore.keras.load_weights(other, files[0])
    assert error(want, other(x)) == 0
    again = build()
    again.load_weights(files[1])
    assert error(want, again(x)) == 0
    fresh = outcore.keras.load_weights(outcore.keras.to_torch(scrambled(build(), 1)), files[0]).state_dict()
    assert all(bool((fresh[name] == value).all()) for name, value in twin.state_dict().items())


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    file = outcore.keras.save_weights(outcore.keras.to_torch(build()), tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match="missing"):
        outcore.keras.load_weights(keras.Sequential([keras.Input((3,)), L.Dense(2, name="other")]), file)
    with pytest.raises(ModelError, match="neither"):
        outcore.keras.save_weights(outcore.keras.to_torch(build()), tmp_path / "a.pt")


@pytest.mark.parametrize("shape", [(5,), (6, 4), (4, 4, 3), (4, 4, 4, 2)])
def test_weights_without_versions_as_files_have_them_load_into_a_twin(shape: tuple[int, ...]) -> None:
    """torch adds a count of batches to those of batch normalization, which twins do not have."""
    given = keras.Input(shape)
    model = keras.Model(given, L.BatchNormalization()(given))
    twin, other = (outcore.keras.to_torch(scrambled(model, seed), check=False) for seed in (0, 1))
    weights = {name: value.clone() for name, value in twin.state_dict().items()}
    other.load_state_dict(weights)
    assert all(bool((value == weights[name]).all()) for name, value in other.state_dict().items())
