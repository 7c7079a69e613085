"""What autograd saves for backward, under a plan: the user's own forward runs, aligned with the plan call by call."""
