"""A stage on a rank: its recorded part of the network, its policies, its norms and random numbers."""
