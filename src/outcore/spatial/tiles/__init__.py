"""Grids of ranks of which each streams its part of the image in tiles."""
