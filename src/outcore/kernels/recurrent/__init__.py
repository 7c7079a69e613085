"""Triton kernels of recurrent layers (`outcore.scan`)."""
