"""Tensors that leave the device for host memory or disk and come back: storage, copies, limits."""
