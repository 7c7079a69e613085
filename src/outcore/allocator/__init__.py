"""Simulators of torch's caching allocator: what it reserves for tensors that come and go."""
