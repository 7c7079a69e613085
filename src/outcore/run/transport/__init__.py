"""Tensors between ranks: point to point, through shared memory or the host, and all-reduce."""
