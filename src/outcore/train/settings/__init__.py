"""What a run is told: configuration, its dataclasses, optimizers and schedules by name."""
