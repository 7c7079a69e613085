"""Planning several ranks: stages, replicas, schedule and micro-batches, chosen by simulation."""
