"""A Keras model on the torch backend, as the torch module it is.

On this backend every Keras layer is an `nn.Module` with parameters, so a model that cannot be carried over (a class
whose ``call`` does what symbolic tensors do not allow) can be recorded and trained all the same. One thing differs:
Keras follows ``training=`` of a call, torch the mode of the module. `KerasModule` passes the one on as the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["KerasModule"]


class KerasModule(nn.Module):
    """Calls a Keras model with ``training=`` as the module's mode says."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The model's own, with inputs as it takes them."""
        given = inputs[0] if len(inputs) == 1 else list(inputs)
        return self.model(given, training=self.training)
