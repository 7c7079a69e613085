"""The optimizers of all members, stepped as one."""
