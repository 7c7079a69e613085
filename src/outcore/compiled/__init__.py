"""torch.compile's kernels within a memory budget: `outcore.within(..., compile=True)`."""
