"""Weights back from a twin into Keras, and to files under Keras' names.

Files are ``.safetensors``, named by the paths that ``model.weights`` has and in Keras' shapes, or Keras' own
``.weights.h5``. Neither can hold code; no pickle is read or written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from outcore.errors import ModelError
from outcore.keras.installed import is_keras, require_keras
from outcore.keras.twin import Twin

__all__ = ["from_torch", "load_weights", "save_weights", "write_back"]


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


def save_weights(twin: Twin, path: str | Path) -> Path:
    """Write a twin's weights and statistics under Keras' names, as ``.safetensors`` or ``.weights.h5``.

    ``model.load_weights`` reads the latter; `load_weights` reads the former, into a twin or a Keras model.
    """
    path = Path(path)
    if path.name.endswith(".weights.h5"):
        from_torch(twin).save_weights(path)
        return path
    if path.suffix != ".safetensors":
        raise ModelError(f"{path.name} is neither .safetensors nor .weights.h5")
    safetensors.numpy.save_file(_by_path(twin), path)
    return path


def load_weights(into: Any, path: str | Path) -> Any:
    """Read weights that `save_weights` wrote as ``.safetensors`` into a twin or a Keras model; returns it.

    Nothing is changed unless every weight is there in its shape.
    """
    arrays = safetensors.numpy.load_file(Path(path))
    if isinstance(into, Twin):
        wanted = {entry.path: entry.shape for entry in into.carried}
    elif is_keras(into):
        wanted = {str(v.path): tuple(int(n) for n in v.shape) for v in into.weights}
    else:
        raise ModelError(f"load_weights takes a twin or a Keras model; given was {type(into).__name__}")
    for name, shape in wanted.items():
        found = tuple(arrays[name].shape) if name in arrays else None
        if found != shape:
            raise ModelError(f"{name} is {shape} in the model; in {Path(path).name} it is {found or 'missing'}")
    if not isinstance(into, Twin):
        for variable in into.weights:
            variable.assign(arrays[str(variable.path)])
        return into
    state = into.state_dict(keep_vars=True)
    with torch.no_grad():
        for entry in into.carried:
            state[entry.name].copy_(entry.to_torch(arrays[entry.path]))
    return into


def _by_path(twin: Twin) -> dict[str, np.ndarray[Any, Any]]:
    """The weights in Keras' shapes, by Keras' paths."""
    state = twin.state_dict(keep_vars=True)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for entry in twin.carried:
        tensor = state[entry.name]
        if entry.path not in arrays:
            arrays[entry.path] = np.zeros(entry.shape, tensor.detach().cpu().numpy().dtype)
        entry.into_keras(tensor, arrays[entry.path])
    if len(arrays) != len({entry.index for entry in twin.carried}):
        raise ModelError("two weights of the model have one path; name its layers apart")
    return arrays
