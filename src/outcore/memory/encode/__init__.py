"""Smaller forms of saved tensors: bit masks, byte indices, sparse and quantised numbers."""
