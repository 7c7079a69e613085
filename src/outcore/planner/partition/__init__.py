"""Cutting a network into stages."""
