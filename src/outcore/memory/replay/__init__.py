"""Replaying a recorded forward under policies, for CUDA graphs and fused operations."""
