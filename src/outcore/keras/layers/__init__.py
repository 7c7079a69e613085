"""What each of Keras' layers and operations is in torch; one file per family."""

from outcore.keras.layers import (
    activation,
    attention,
    convolution,
    core,
    normalization,
    operations,
    pooling,
    preprocessing,
    recurrent,
    reshaping,
)

__all__ = [
    "activation",
    "attention",
    "convolution",
    "core",
    "normalization",
    "operations",
    "pooling",
    "preprocessing",
    "recurrent",
    "reshaping",
]
