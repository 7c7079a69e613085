"""Whether Keras is there, and whether a thing is a model of it, without importing it.

Keras takes seconds to import and is an extra. A Keras model can only be there when Keras has been imported already, so
asking for its class in the modules that are loaded is enough.

Keras draws the seeds of its initial weights from Python's `random`, and numbers its layers for as long as the process
lives. Two builds of a job have to be the same: `repeatable` makes seeds follow torch's and names begin anew.

Triton is loaded before TensorFlow, or not at all (`outcore.load_order`).
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from outcore.errors import ModelError
from outcore.load_order import settle_triton

__all__ = [
    "as_module",
    "is_keras",
    "is_keras_2",
    "numbered_anew",
    "on_tensorflow",
    "refuse_keras_2",
    "repeatable",
    "require_keras",
]


settle_triton(source="")

_COUNTS = "object_name_uids"
"""Where Keras counts names."""


def require_keras() -> Any:
    """The keras package, version 3."""
    settle_triton()
    try:
        keras = importlib.import_module("keras")
    except ModuleNotFoundError as error:
        raise ModelError(f"{error.name} is not installed; pip install 'outcore[keras]'") from error
    version = str(getattr(keras, "__version__", "0"))
    if int(version.split(".")[0]) < 3:
        raise ModelError(f"keras is {version}; 3 is needed: pip install 'keras>=3'")
    importlib.import_module("keras.src.models.functional")
    return keras


def is_keras(thing: Any) -> bool:
    """Whether it is a layer or model of Keras 3."""
    keras = sys.modules.get("keras")
    layer = getattr(getattr(keras, "layers", None), "Layer", None)
    return layer is not None and isinstance(thing, layer) and not is_keras_2(thing)


def on_tensorflow(thing: Any) -> bool:
    """Whether it is a model of Keras 3 that is no torch module."""
    return is_keras(thing) and not isinstance(thing, torch.nn.Module)


def is_keras_2(thing: Any) -> bool:
    """Whether it is a layer or model of Keras 2: of ``tf_keras``, or of TensorFlow's own old one."""
    return any(
        kind.__module__.startswith(("tf_keras.", "keras.src.engine.", "keras.engine.", "tensorflow.python.keras."))
        for kind in type(thing).__mro__
    )


def refuse_keras_2(model: Any) -> None:
    """Say what to do with a model of Keras 2."""
    if is_keras_2(model):
        raise ModelError(
            f"{type(model).__name__} is a model of Keras 2, which cannot be carried over; build it with Keras 3 "
            "(import keras, version 3) and load the weights with model.load_weights"
        )


def as_module(model: Any) -> Any:
    """A Keras model as its twin; everything else as it is.

    On the torch backend a built model that cannot be carried over is taken as the torch module that it is.
    """
    refuse_keras_2(model)
    if not is_keras(model):
        return model
    from outcore.keras.convert import to_torch

    try:
        return to_torch(model)
    except ModelError:
        if not isinstance(model, torch.nn.Module) or not model.built:
            raise
    from outcore.keras.torch_backend import KerasModule

    return KerasModule(model)


@contextmanager
def repeatable() -> Iterator[None]:
    """While this is open, Keras' seeds follow torch's generator, and its names are counted from the beginning.

    Without Keras nothing is drawn. Python's own generator and Keras' counts are put back in any case.
    """
    if "keras" not in sys.modules:
        yield
        return
    before = random.getstate()
    random.seed(int(torch.randint(2**62, (), device="cpu")))
    try:
        with numbered_anew():
            yield
    finally:
        random.setstate(before)


@contextmanager
def numbered_anew() -> Iterator[None]:
    """While this is open, Keras' names are counted from the beginning; its counts are put back in any case."""
    state = importlib.import_module("keras.src.backend.common.global_state")
    counts = state.get_global_attribute(_COUNTS)
    state.set_global_attribute(_COUNTS, None)
    try:
        yield
    finally:
        state.set_global_attribute(_COUNTS, counts)
