"""Time against memory of a training step: the public call with its defaults beside every peer, tuned."""
