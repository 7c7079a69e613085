"""outcore: train networks that do not fit, and fill the GPU with the ones that do."""

__version__ = "0.1.0"
