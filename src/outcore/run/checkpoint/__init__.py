"""Checkpoints: files, restoring, and the state that goes into them."""
