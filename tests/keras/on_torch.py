"""Run with ``KERAS_BACKEND=torch``: Keras itself in float64 on torch, against the twin of the same model; prints JSON.

On TensorFlow, Keras rounds some constants to float32 in a float64 model (GELU, leaky ReLU). On torch it casts most
operations to float32, by one entry of its table of type promotion; with that entry changed it computes in float64
throughout, so here every difference beyond rounding is a fault of the twin. The models of keras.applications are
compared and trained with fixed statistics: in training at this size, batch normalization over a few values enlarges
rounding by up to 1e7. The graph of the twin is compared with Keras' own, layer by layer and edge by edge, and what was
trained goes back into a new Keras model, whose ``predict`` is compared.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from typing import Any

import keras
import numpy as np
import torch
from keras.src.backend.common import dtypes

import outcore
from outcore.keras import optimizer_of, to_torch, write_back
from outcore.keras.check import example_inputs
from tests.keras.networks import APPLICATIONS, NETWORKS


def scrambled(model: Any, share: float = 1.0) -> Any:
    """Biases and statistics that are not zero or one; deep networks explode if they are far from it."""
    random = np.random.default_rng(0)
    for variable in model.weights:
        if variable.dtype.startswith("float") and len(variable.shape) <= 1:
            noise = share * random.uniform(0.05, 0.3, tuple(variable.shape))
            variable.assign(keras.ops.convert_to_numpy(variable) + noise)
    return model


def without_dropout(model: Any) -> Any:
    for layer in model._flatten_layers():
        for name in ("rate", "drop_path_rate", "_dropout"):
            if hasattr(layer, name):
                setattr(layer, name, 0.0)
    return model


def difference(want: torch.Tensor, have: torch.Tensor, scale: float) -> float:
    if not want.numel():
        return 0.0
    found = float((want.double() - have.double()).abs().max()) / max(scale, 1e-30)
    return found if math.isfinite(found) else math.inf


def gradients_differ(model: Any, twin: Any) -> float:
    """The largest difference of a gradient, over the largest gradient."""
    state = twin.state_dict(keep_vars=True)
    pairs = []
    for entry in twin.carried:
        variable = model.weights[entry.index]
        if variable.trainable:
            grad = variable.value.grad
            want = entry.to_torch(np.zeros(entry.shape) if grad is None else grad.numpy())
            have = state[entry.name].grad
            pairs.append((want, torch.zeros_like(want) if have is None else have))
    largest = max(float(want.abs().max()) for want, _ in pairs)
    return max(difference(want, have, largest) for want, have in pairs)


def once(model: Any, inputs: list[Any], training: bool) -> dict[str, float]:
    """Outputs, loss and gradients of one call."""
    twin = to_torch(model).train(training)
    given = [torch.from_numpy(x) for x in inputs]
    made = []
    for run in (lambda: model(given if len(given) > 1 else given[0], training=training), lambda: twin(*given)):
        out = run()
        loss = (out**2).mean()
        loss.backward()
        made.append((out.detach(), loss.item()))
    (want, loss), (have, mine) = made
    return {
        "output": difference(want, have, float(want.abs().max())),
        "loss": abs(loss - mine) / max(abs(loss), 1e-30),
        "gradient": gradients_differ(model, twin),
    }


def trained(model: Any, inputs: list[Any], optimizer: Any, steps: int) -> dict[str, float]:
    """Weights after some steps of Keras' optimizer, and of torch's on the twin."""
    twin = to_torch(model).train()
    theirs = optimizer_of(optimizer, twin.parameters())
    given = [torch.from_numpy(x) for x in inputs]
    variables = model.trainable_variables
    for _ in range(steps):
        model.zero_grad()
        (model(given if len(given) > 1 else given[0], training=True) ** 2).mean().backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)
        theirs.zero_grad()
        (twin(*given) ** 2).mean().backward()
        theirs.step()
    state = twin.state_dict()
    worst = predicted(model, twin, inputs)
    for entry in twin.carried:
        want = entry.to_torch(keras.ops.convert_to_numpy(model.weights[entry.index]))
        worst = max(worst, difference(want, state[entry.name], max(1.0, float(want.abs().max()))))
    return {f"{type(optimizer).__name__} x {steps}": worst}


def predicted(model: Any, twin: Any, inputs: list[Any]) -> float:
    """The difference of a Keras model with the twin's weights, which predicts, from the twin."""
    made = write_back(twin, keras.models.clone_model(model))
    want = made.predict(inputs if len(inputs) > 1 else inputs[0], verbose=0)
    with torch.no_grad():
        have = twin.eval()(*(torch.from_numpy(x) for x in inputs))
    return difference(torch.from_numpy(want), have, float(np.abs(want).max()))


def graph_differs(model: Any, inputs: list[Any]) -> int:
    """How many layers, and edges between them, are in one of both graphs only."""
    graph = outcore.capture(to_torch(model, check=False).train(), tuple(torch.from_numpy(x) for x in inputs))
    have = {(a, b) for b, sources in graph.adjacency(1, "inputs").items() for a in sources if a in graph.root.children}
    inside = {id(node) for nodes in model._nodes_by_depth.values() for node in nodes}
    want = {
        (parent.operation.name, operation.name)
        for operation in model.operations
        for node in operation._inbound_nodes
        if id(node) in inside
        for parent in node.parent_nodes
        if not isinstance(parent.operation, keras.layers.InputLayer)
    }
    names = {x.name for x in model.operations if not isinstance(x, keras.layers.InputLayer)}
    shown = set(graph.root.children) - {"permute()"}  # of images, to channels first and back
    wrong = (names ^ shown) | (want ^ have)
    print(sorted(map(str, wrong))[:20], file=sys.stderr)
    return len(wrong)


def application(name: str) -> Any:
    make = getattr(keras.applications, name)
    more = {"include_preprocessing": False} if "include_preprocessing" in inspect.signature(make).parameters else {}
    shape = (APPLICATIONS[name], APPLICATIONS[name], 3)
    return make(weights=None, input_shape=shape, include_top=False, pooling="avg", **more)


def compare(name: str) -> dict[str, float]:
    keras.utils.set_random_seed(0)
    found: dict[str, float] = {}
    if name in APPLICATIONS:
        for optimizer in (None, keras.optimizers.SGD(1e-3, momentum=0.9), keras.optimizers.Adam(1e-4)):
            model = scrambled(without_dropout(application(name)), 0.1)
            inputs = example_inputs(model, APPLICATIONS[name], 1)
            if optimizer is None:
                whole = application(name)  # a layer whose rate is zero does nothing, and is in no graph
                found |= once(model, inputs, training=False) | {"graph": graph_differs(whole, inputs)}
                continue
            for layer in model.layers:
                layer.trainable = not isinstance(layer, keras.layers.BatchNormalization)
            found |= trained(model, inputs, optimizer, 20)
        return found
    for optimizer in (None, keras.optimizers.SGD(0.01, momentum=0.9), keras.optimizers.Adam(0.01)):
        model = scrambled(NETWORKS[name](keras))
        inputs = example_inputs(model, 16)
        if optimizer is None:
            found |= once(model, inputs, training=True) | {"graph": graph_differs(model, inputs)}
        else:
            found |= trained(model, inputs, optimizer, 20)
    return found


if __name__ == "__main__":
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    keras.config.set_floatx("float64")
    for one in sys.argv[1:]:
        print(json.dumps({"name": one, **compare(one)}), flush=True)
        keras.backend.clear_session()
