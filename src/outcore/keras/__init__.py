"""Keras models: carried over to torch, trained there, and carried back."""

from outcore.keras.convert import to_torch
from outcore.keras.twin import Twin
from outcore.keras.weights import from_torch, write_back

__all__ = ["Twin", "from_torch", "to_torch", "write_back"]
