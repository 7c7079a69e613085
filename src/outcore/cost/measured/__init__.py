"""Costs by measuring: every call timed and tried by itself on the device that is here."""
