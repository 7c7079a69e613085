"""Whether a scan could pay for a network: Jacobians of its layers, their sparsity, FLOPs of the scan."""
