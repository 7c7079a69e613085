"""A Keras model on the torch backend, as the torch module it is.

On this backend every Keras layer is an `nn.Module` with parameters, so a model that cannot be carried over (a class
whose ``call`` does what symbolic tensors do not allow) can be recorded and trained all the same. One thing differs:
Keras follows ``training=`` of a call, torch the mode of the module. `KerasModule` passes the one on as the other.

Keras holds memory that no policy could free, and that backward does not need. `hold_less` lets go of it:

- a functional model holds the outputs of all its layers until the last has run; they are dropped after their last use;
- the output of a sigmoid or softmax carries its logits as an attribute, for a loss of the TensorFlow backend, and they
  live as long as autograd keeps the output: through backward, at every gate of every step of an LSTM;
- where a layer takes several tensors, Keras goes through them by functions that refer to themselves, and such cycles
  hold the tensors until Python's collector comes; it is called for what is young, after the layers that leave cycles;
- ``fit`` clears gradients after forward, so that those of the step before lie beside all feature maps; they are cleared
  before it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from outcore.keras.installed import require_keras
from outcore.keras.symbolic import functional_of
from outcore.keras.tensorflow.calls import Call, OrderedCall, list_calls

__all__ = ["KerasModule", "hold_as_keras", "hold_less", "name_parameters"]

_LOGITS = "_keras_logits"


class KerasModule(nn.Module):
    """Calls a Keras model with ``training=`` as the module's mode says."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        name_parameters(model)
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The model's own, with inputs as it takes them."""
        given = inputs[0] if len(inputs) == 1 else list(inputs)
        return self.model(given, training=self.training)


def name_parameters(model: Any) -> None:
    """Let every layer of a Keras model have its parameters under their names, as Keras does when it is asked for them.

    Layers of a class that was built by a call have none before, and while they are asked one after the other, the
    parameters of the whole change their names: what is trained is then not found again.
    """
    for layer in model._flatten_layers():
        if layer.built:
            _ = layer.torch_params


class _FunctionalCall(OrderedCall):
    """The calls of a functional model, each value dropped after its last use."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _without_logits():
            return super().__call__(*args, **kwargs)

    def done(self, call: Call) -> None:
        """Collect the cycles that a layer over structures of tensors has left."""
        nested = any(isinstance(item, (list, tuple, dict)) for item in (*call.args, *call.kwargs.values()))
        if nested or getattr(call.operation, "_layers", None):
            gc.collect(1)


class _ClassCall:
    """The ``call`` of a model that was written as a class."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _without_logits():
            return type(self.model).call(self.model, *args, **kwargs)


class _ClearedStep:
    """Keras' training step, with the gradients of the step before cleared first."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, data: Any) -> Any:
        self.model.zero_grad()
        return type(self.model).train_step(self.model, data)


@contextmanager
def _without_logits() -> Iterator[None]:
    """While this is open, a tensor takes no logits along: Keras tries to note them, and goes on if it cannot."""
    if _LOGITS in torch.Tensor.__dict__:  # open already
        yield
        return
    setattr(torch.Tensor, _LOGITS, property())
    try:
        yield
    finally:
        delattr(torch.Tensor, _LOGITS)


def hold_less(model: Any) -> None:
    """Let a Keras model hold no more than backward needs."""
    keras = require_keras()
    if "call" not in model.__dict__:
        functional = functional_of(keras, model)
        model.__dict__["call"] = (
            _ClassCall(model)
            if functional is None
            else _FunctionalCall(keras, functional, list_calls(keras, model, functional), model)
        )
    trainer = keras.src.backend.torch.trainer.TorchTrainer
    if getattr(type(model), "train_step", None) is trainer.train_step:  # one of the user's may add up gradients
        model.__dict__.setdefault("train_step", _ClearedStep(model))


def hold_as_keras(model: Any) -> None:
    """Undo `hold_less`."""
    for name, kinds in (("call", (_FunctionalCall, _ClassCall)), ("train_step", (_ClearedStep,))):
        if isinstance(model.__dict__.get(name), kinds):
            del model.__dict__[name]
