"""What executes a step: plain, within a budget, in tiles, or on many ranks."""
