"""Keras models: carried over to torch, trained there and carried back; or within a budget on TensorFlow itself.

Keras itself is imported by the call that needs it; importing this package does not import it.
"""

from outcore.keras.convert import to_torch
from outcore.keras.installed import require_keras
from outcore.keras.optimizers import Adam, AdamW, optimizer_of
from outcore.keras.tensorflow.planned import TensorFlowPlan, within
from outcore.keras.tensorflow.tiles import stream
from outcore.keras.twin import Twin
from outcore.keras.weights import from_torch, load_weights, save_weights, write_back

__all__ = [
    "Adam",
    "AdamW",
    "TensorFlowPlan",
    "Twin",
    "from_torch",
    "load_weights",
    "optimizer_of",
    "require_keras",
    "save_weights",
    "stream",
    "to_torch",
    "within",
    "write_back",
]
