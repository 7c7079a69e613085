"""The engine: one rank's worker, the batches it is given, the update it makes."""
