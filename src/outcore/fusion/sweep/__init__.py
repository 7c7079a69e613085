"""Sweeps over settings: where trials come from, how they are trained, where results go."""
