"""Keras models on TensorFlow within a memory budget: recomputed segments, micro-batches, tiles."""
