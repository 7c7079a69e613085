"""How long kernels, library calls, copies and the host take in a compiled step."""
