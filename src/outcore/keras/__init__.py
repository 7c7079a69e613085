"""Keras models: carried over to torch, trained there, and carried back.

Keras itself is imported by the call that needs it; importing this package does not import it.
"""

from outcore.keras.convert import to_torch
from outcore.keras.installed import require_keras
from outcore.keras.twin import Twin
from outcore.keras.weights import from_torch, write_back

__all__ = ["Twin", "from_torch", "require_keras", "to_torch", "write_back"]
