"""Are a Keras model and its twin the same function?

Both are run on one random input in evaluation, and their outputs compared relative to the largest. Where they differ,
the first layer whose own output differs is named, so that the fault can be found.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch

from outcore.errors import ModelError
from outcore.keras.installed import require_keras
from outcore.keras.symbolic import inputs_of
from outcore.keras.twin import Twin, leaves

__all__ = ["check_twin", "example_inputs"]

_TOLERANCE = {"float64": 1e-5, "float32": 2e-3}
"""Of the largest output. A deep network in float32 differs by rounding alone in the fourth digit; and in float64 Keras
rounds some constants, and TensorFlow all of a bilinear interpolation, to float32."""


def example_inputs(model: Any, size: int = 32, batch: int = 2, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    """Random inputs for a model; dimensions that it leaves open have `size` elements."""
    random = np.random.default_rng(seed)
    sizes = (getattr(layer, name, None) for layer in _all_layers(model) for name in ("input_dim", "num_tokens"))
    most = min((int(size) for size in sizes if size is not None), default=2)
    made = []
    for tensor in leaves(inputs_of(require_keras(), model)):
        shape = (batch, *(size if n is None else n for n in tensor.shape[1:]))
        if "float" in str(tensor.dtype):
            made.append(random.standard_normal(shape).astype(str(tensor.dtype)))
        elif tensor.dtype == "bool":
            made.append(random.random(shape) < 0.5)
        else:
            made.append(random.integers(0, max(1, most), shape).astype(str(tensor.dtype)))
    return made


def check_twin(model: Any, twin: Twin) -> None:
    """Raise if the two differ."""
    keras = require_keras()
    batch = _batch(keras, model)
    for size in (32, 64, 96, 128, 256):
        inputs = example_inputs(model, size, batch)
        try:
            expected = run_keras(keras, model, inputs)
        except Exception:  # too small for the network's strides: a larger one may do
            if size == 256:
                raise
            continue
        break
    training = twin.training
    twin.eval()
    with torch.no_grad():
        found = [x.numpy() for x in leaves(twin(*[torch.from_numpy(x) for x in inputs]))]
    twin.train(training)
    for number, (want, have) in enumerate(zip(expected, found, strict=True)):
        tolerance = _TOLERANCE.get(str(want.dtype), 0.0)
        if want.shape != have.shape:
            raise ModelError(f"output {number} of {model.name} is {want.shape} in Keras and {have.shape} in torch")
        scale = max(float(np.abs(want).max(initial=0.0)), 1e-30) if want.dtype.kind == "f" else 1.0
        error = float(np.abs(want.astype("float64") - have.astype("float64")).max(initial=0.0)) / scale
        if not error <= tolerance:
            raise ModelError(
                f"output {number} of {model.name} differs by {error:.2g} of its largest between Keras and torch "
                f"({tolerance:.0e} was allowed); please report this model"
            )


def _batch(keras: Any, model: Any) -> int:
    """How many samples to compare on: of two or more, the first number that is no size of a value in the model.

    On TensorFlow, Keras takes a column that is as long as there are channels for a bias: for as many samples as
    channels, ``x + keras.ops.sum(x, axis=-1, keepdims=True)`` is another sum.
    """
    declared = [tensor.shape[0] for tensor in leaves(inputs_of(keras, model)) if tensor.shape[0] is not None]
    if declared:
        return int(declared[0])
    graphs = [one for one in (model, *_all_layers(model)) if hasattr(one, "_nodes_by_depth")]
    nodes = (node for graph in graphs for depth in graph._nodes_by_depth.values() for node in depth)
    taken = {size for node in nodes for tensor in node.outputs for size in tensor.shape}
    return next(n for n in range(2, len(taken) + 3) if n not in taken)


def run_keras(keras: Any, model: Any, inputs: list[Any]) -> list[np.ndarray[Any, Any]]:
    """The outputs of a Keras model in evaluation, as arrays."""
    structure = inputs_of(keras, model)
    given: Any = [keras.ops.convert_to_tensor(x) for x in inputs]
    if isinstance(structure, dict):
        given = dict(zip(sorted(structure), given, strict=True))
    elif not isinstance(structure, (list, tuple)):
        given = given[0]
    with torch.no_grad() if keras.backend.backend() == "torch" else contextlib.nullcontext():
        made = model(given, training=False)
    return [np.asarray(keras.ops.convert_to_numpy(x)) for x in leaves(made)]


def _all_layers(model: Any) -> list[Any]:
    return list(model._flatten_layers()) if hasattr(model, "_flatten_layers") else list(model.layers)
