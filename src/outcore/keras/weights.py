"""Weights back from a twin into Keras."""

from __future__ import annotations

from typing import Any

import numpy as np

from outcore.errors import ModelError
from outcore.keras.installed import is_keras, require_keras
from outcore.keras.twin import Twin

__all__ = ["from_torch", "write_back"]


def write_back(twin: Twin, model: Any) -> Any:
    """Put a twin's weights and statistics into the Keras model it was made from, or one built alike.

    Nothing is written unless every weight fits. Returns the model.
    """
    keras = require_keras()
    if not is_keras(model):
        raise ModelError(
            f"write_back takes the Keras model that the twin was made from; given was {type(model).__name__}"
        )
    if not isinstance(twin, Twin):
        raise ModelError(f"write_back takes a twin made by to_torch; given was {type(twin).__name__}")
    variables = list(model.weights)
    state = twin.state_dict(keep_vars=True)
    arrays: dict[int, np.ndarray[Any, Any]] = {}
    for entry in twin.carried:
        if entry.index >= len(variables) or tuple(variables[entry.index].shape) != entry.shape:
            given = "is not there" if entry.index >= len(variables) else f"is {tuple(variables[entry.index].shape)}"
            raise ModelError(f"{entry.path} is {entry.shape} in the twin's model; in {model.name} it {given}")
        if entry.index not in arrays:
            arrays[entry.index] = np.array(keras.ops.convert_to_numpy(variables[entry.index]))
        entry.into_keras(state[entry.name], arrays[entry.index])
    for index, array in arrays.items():
        variables[index].assign(array)
    return model


def from_torch(twin: Twin) -> Any:
    """A new Keras model with a twin's weights and statistics, built from the configuration of the first.

    Raises:
        ModelError: the first model has layers of the user's own, which cannot be rebuilt; use `write_back`.
    """
    keras = require_keras()
    if not isinstance(twin, Twin) or twin.config is None:
        raise ModelError(
            "this twin keeps no configuration; use write_back(twin, model) with the model it was made from"
        )
    try:
        model = keras.models.model_from_json(twin.config)
    except (TypeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(f"the model cannot be rebuilt ({first}); use write_back(twin, model)") from error
    return write_back(twin, model)
