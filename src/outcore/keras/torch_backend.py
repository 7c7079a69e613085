"""A Keras model on the torch backend, as the torch module it is.

On this backend every Keras layer is an `nn.Module` with parameters, so a model that cannot be carried over (a class
whose ``call`` does what symbolic tensors do not allow) can be recorded and trained all the same. One thing differs:
Keras follows ``training=`` of a call, torch the mode of the module. `KerasModule` passes the one on as the other.

A functional Keras model holds the outputs of all its layers until the last has run, so that no policy could free one in
forward. `drop_early` puts a ``call`` on it that does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outcore.keras.installed import require_keras
from outcore.keras.tensorflow.calls import OrderedCall, functional_of, list_calls

__all__ = ["KerasModule", "drop_early", "hold_all"]


class KerasModule(nn.Module):
    """Calls a Keras model with ``training=`` as the module's mode says."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The model's own, with inputs as it takes them."""
        given = inputs[0] if len(inputs) == 1 else list(inputs)
        return self.model(given, training=self.training)


def drop_early(model: Any) -> None:
    """Let a functional model drop each value after its last use; other models are left as they are."""
    keras = require_keras()
    functional = functional_of(keras, model)
    if functional is not None and "call" not in model.__dict__:
        model.__dict__["call"] = OrderedCall(keras, functional, list_calls(keras, model, functional), model)


def hold_all(model: Any) -> None:
    """Undo `drop_early`."""
    if isinstance(model.__dict__.get("call"), OrderedCall):
        del model.__dict__["call"]
