"""Running the tiles of a plan, forward and backward."""
