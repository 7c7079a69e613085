"""Planning one device: which saved tensors to keep, recompute, offload or encode, and where parameters live."""
