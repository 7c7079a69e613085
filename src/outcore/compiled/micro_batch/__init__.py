"""A batch in micro-batches, inside of one call of a compiled model, where every sample is for itself."""
