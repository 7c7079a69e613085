"""Run with ``KERAS_BACKEND=torch``: drawn models against their twins in float64; prints a JSON line per model.

    KERAS_BACKEND=torch python -m tests.keras.drawn_twins FIRST LAST

Compared are outputs in evaluation and in training, the gradients of all weights and of the inputs, running statistics,
and what a new Keras model predicts with the weights of the twin. Differences are over the largest value of their kind.
``sensitivity`` is what one unit in the last place of the inputs changes in the gradients of the twin: where few values
are normalized, it is large, and no two orders of summation agree better.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import keras
import numpy as np
import torch
from keras.src.backend.common import dtypes

from outcore.errors import ModelError
from outcore.keras import to_torch, write_back
from outcore.keras.twin import leaves
from tests.keras.drawn_models import drawn_model
from tests.keras.on_torch import difference, scrambled


def _largest(tensors: list[torch.Tensor]) -> float:
    return max([1e-3, *(float(t.abs().max()) for t in tensors if t.numel())])


def _differ(want: list[torch.Tensor], have: list[torch.Tensor]) -> float:
    scale = _largest(want)
    return max([0.0, *(difference(a, b, scale) for a, b in zip(want, have, strict=True))])


def _run(model: Any, given: list[torch.Tensor], training: bool | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, and the gradients of the inputs; those of weights stay in them."""
    given = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    if training is None:
        made = list(leaves(model(*given)))
    else:
        made = list(leaves(model(given if len(given) > 1 else given[0], training=training)))
    sum((out**2).mean() for out in made).backward()  # type: ignore[union-attr]
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in given if x.is_floating_point()]
    return [x.detach() for x in made], gradients


def _weight_gradients(model: Any, twin: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    state, want, have = twin.state_dict(keep_vars=True), [], []
    for entry in twin.carried:
        variable = model.weights[entry.index]
        if variable.trainable:
            found = variable.value.grad
            want.append(entry.to_torch(np.zeros(tuple(variable.shape)) if found is None else found.numpy()))
            mine = state[entry.name].grad
            have.append(torch.zeros_like(want[-1]) if mine is None else mine)
    return want, have


def compare(seed: int) -> dict[str, Any]:
    """How far a model and its twin are apart."""
    model, inputs = drawn_model(keras, seed)
    scrambled(model)
    twin = to_torch(model)
    given = [torch.from_numpy(x) for x in inputs]
    found: dict[str, Any] = {"seed": seed, "layers": len(model.layers)}
    with torch.no_grad():
        want = list(leaves(model(given if len(given) > 1 else given[0], training=False)))
        found["evaluation"] = _differ(want, list(leaves(twin.eval()(*given))))
    twin.train()
    try:
        want, of_inputs = _run(model, given, True)
    except RuntimeError as error:  # torch's own convolution: "slow_conv2d: grad_weight must be contiguous"
        return found | {"plain Keras failed": str(error)}
    have, mine = _run(twin, given, None)
    found["training"] = _differ(want, have)
    found["inputs"] = _differ(of_inputs, mine)
    theirs, ours = _weight_gradients(model, twin)
    found["weights"] = _differ(theirs, ours)
    found["statistics"] = max(
        [0.0]
        + [
            difference(entry.to_torch(keras.ops.convert_to_numpy(model.weights[entry.index])), tensor.detach(), 1.0)
            for entry in twin.carried
            if not (tensor := twin.state_dict(keep_vars=True)[entry.name]).requires_grad
        ]
    )
    found["sensitivity"] = _sensitivity(twin, given, ours)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.1)
        again = write_back(twin, keras.models.clone_model(model))
        told = again.predict(inputs if len(inputs) > 1 else inputs[0], verbose=0)
        found["predict"] = _differ([torch.from_numpy(x) for x in leaves(told)], list(leaves(twin.eval()(*given))))
    return found


def _sensitivity(twin: Any, given: list[torch.Tensor], gradients: list[torch.Tensor]) -> float:
    """What a change of the inputs in the last place changes in the gradients of the weights."""
    before = [g.clone() for g in gradients]
    twin.zero_grad()
    random = torch.Generator().manual_seed(0)
    moved = [x * (1 + 2.3e-16 * torch.randn(x.shape, generator=random).sign().double()) if x.is_floating_point() else x
             for x in given]  # fmt: skip
    _run(twin, moved, None)
    state = twin.state_dict(keep_vars=True)
    after = [state[e.name].grad for e in twin.carried if state[e.name].requires_grad]
    return _differ(before, [torch.zeros_like(b) if a is None else a for a, b in zip(after, before, strict=True)])


if __name__ == "__main__":
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    keras.config.set_floatx("float64")
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            print(json.dumps(compare(number)), flush=True)
        except ModelError as error:
            print(json.dumps({"seed": number, "refused": str(error)}), flush=True)
        except Exception as error:
            print(json.dumps({"seed": number, "failed": f"{type(error).__name__}: {error}"[:400]}), flush=True)
        keras.backend.clear_session()
