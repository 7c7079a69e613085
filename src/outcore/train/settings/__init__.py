"""The settings of a run: configuration, its dataclasses, optimizers and schedules by name."""
