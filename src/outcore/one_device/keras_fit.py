"""What is known of ``fit`` when a Keras model on torch is planned: its loss and its optimizer.

Keras' optimizers step all parameters together, and some make several values of the size of all of them on the way
(Adam three). That is not documented and differs between them, so a copy of the compiled optimizer takes two steps on
a handful of numbers, as `outcore.cost.optimizer_cost` lets torch's do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from outcore.cost.measured.live_bytes import LiveBytes
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import ModelError, OutcoreError
from outcore.keras.fit_loss import FitLoss
from outcore.keras.installed import is_keras, require_keras
from outcore.keras.symbolic import functional_of
from outcore.keras.torch_backend import hold_as_keras, hold_less, name_parameters

_SIZES = (4096, 4096, 8192)


@contextmanager
def prepared(model: Any) -> Iterator[None]:
    """A Keras model made to hold no more than backward needs; as it was, if planning fails. Others are left alone."""
    if not is_keras(model):
        yield
        return
    if not model.built:  # recording a call would build it without memory
        raise ModelError(f"{model.name} ({type(model).__name__}) is not built; call it once on a batch")
    name_parameters(model)
    hold_less(model)
    try:
        yield
    except BaseException:
        hold_as_keras(model)
        raise


def inputs_of(model: Any, args: Any) -> Any:
    """Arguments as a Keras model of several inputs takes them: one structure, also where they are given one by one.

    A shape in it becomes a tensor without memory, of the type that the input was declared with.
    """
    functional = functional_of(require_keras(), model) if is_keras(model) else None
    declared = getattr(functional, "_inputs_struct", None)
    if not isinstance(declared, (list, tuple, dict)):
        if declared is not None and isinstance(args, (list, tuple)) and len(args) == 1:
            _check_shape(model, args[0], declared)
        return args
    tree = require_keras().tree
    alone = isinstance(args, (list, tuple)) and len(args) == 1
    given = args[0] if alone and isinstance(args[0], (list, tuple, dict)) and not _is_shape(args[0]) else args
    if isinstance(given, dict):
        if not isinstance(declared, dict) or set(given) != set(declared):
            return (given,)
        flat = [given[name] for name in sorted(given)]
    else:
        flat = list(given) if isinstance(given, (list, tuple)) and not _is_shape(given) else [given]
    wanted = tree.flatten(declared)
    if len(flat) != len(wanted):
        return args
    for one, tensor in zip(flat, wanted, strict=True):
        _check_shape(model, one, tensor)
    made = [_stand_in(one, tensor) if _is_shape(one) else one for one, tensor in zip(flat, wanted, strict=True)]
    return (tree.pack_sequence_as(declared, made),)


def _check_shape(model: Any, given: Any, declared: Any) -> None:
    """Refuse an input that the model is not declared for; Keras adds or takes off a last side of one."""
    shape = tuple(given) if _is_shape(given) else tuple(getattr(given, "shape", ()))
    wanted = tuple(declared.shape)
    if not shape:
        return
    longer, shorter = sorted((shape, wanted), key=len, reverse=True)
    if len(longer) == len(shorter) + 1 and longer[-1] == 1:
        shape, wanted = shape[: len(shorter)], wanted[: len(shorter)]
    if len(shape) != len(wanted) or any(b not in (None, a) for a, b in zip(shape, wanted, strict=True)):
        raise OutcoreError(f"{model.name} takes an input of shape {tuple(declared.shape)}; given was {shape}")


def _is_shape(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(type(n) is int for n in value)


def _stand_in(shape: Any, declared: Any) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=getattr(torch, str(declared.dtype)), device="meta")


def fit_of(model: Any, kwargs: Any, loss: Any, optimizer: Any, *, bitwise: bool) -> tuple[Any, Any, Any]:
    """Keyword arguments, loss and optimizer of a Keras model's ``fit``, where the caller has named none; else those.

    Where rounding may differ, a loss is more than counted: the last layer may run in chunks with it. Keras takes its
    loss by itself, so none is assumed there.
    """
    if not is_keras(model):
        return kwargs, loss, optimizer
    keras = require_keras()
    if kwargs is None and getattr(model, "_call_has_training_arg", False):
        kwargs = {"training": True}
    if loss is None and bitwise:
        loss = FitLoss(keras, model)
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.Optimizer):
        optimizer = keras_optimizer_cost(keras, optimizer)
    return kwargs, loss, optimizer


def keras_optimizer_cost(keras: Any, optimizer: Any) -> OptimizerCost:
    """State and workspace of a Keras optimizer on torch, from two steps of a copy of it."""
    name = type(optimizer).__name__
    (state, together), (_, alone) = (_count(keras, optimizer, sizes) for sizes in (_SIZES, _SIZES[-1:]))
    if together > 1.25 * alone:
        return OptimizerCost(name, state, workspace_per_parameter=together / sum(_SIZES) / 4, together=True)
    return OptimizerCost(name, state, workspace_per_largest=alone / _SIZES[-1] / 4)


def _count(keras: Any, optimizer: Any, sizes: tuple[int, ...]) -> tuple[float, int]:
    """State over the parameters, and the peak of the second step above what is there."""
    copied = type(optimizer).from_config(optimizer.get_config())
    variables = [keras.Variable(torch.ones(n, device="cpu"), dtype="float32") for n in sizes]
    gradients = [torch.ones(n, device="cpu") for n in sizes]
    with keras.device("cpu"):
        copied.apply(gradients, variables)
        kept = [v.value for v in copied.variables]
        state = sum(t.nbytes for t in kept if t.numel() > 1) / sum(sizes) / 4
        with LiveBytes([*kept, *gradients, *(v.value for v in variables)]) as live:
            copied.apply(gradients, variables)
    return round(state, 3), live.peak
