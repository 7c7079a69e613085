"""Spatial parallelism: one image over a grid of ranks, with halo exchange."""
