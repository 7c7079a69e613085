"""What a run writes: its folder, journal, predictions, checkpoints' fingerprints, closing note."""
