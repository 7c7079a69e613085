"""Choosing tiles, passes and boundary for a budget."""
