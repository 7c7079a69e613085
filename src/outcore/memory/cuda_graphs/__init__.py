"""A training step as CUDA graphs, within the budget."""
