"""Whether Keras is there, and whether a thing is a model of it, without importing it.

Keras takes seconds to import and is an extra. A Keras model can only be there when Keras has been imported already, so
asking for its class in the modules that are loaded is enough.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from outcore.errors import ModelError

__all__ = ["is_keras", "is_keras_2", "require_keras"]


def require_keras() -> Any:
    """The keras package, version 3."""
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


def is_keras_2(thing: Any) -> bool:
    """Whether it is a layer or model of Keras 2: of ``tf_keras``, or of TensorFlow's own old one."""
    return any(
        kind.__module__.startswith(("tf_keras.", "keras.src.engine.", "keras.engine.", "tensorflow.python.keras."))
        for kind in type(thing).__mro__
    )
