"""Launching the Triton kernels of recurrent layers: which exist for a case, and in which sizes."""
