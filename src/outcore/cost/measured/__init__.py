"""Costs by measuring: every call timed and tried in isolation on the device that is present."""
