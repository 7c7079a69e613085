"""The training application: what `outcore train` does, as parts that can be used alone."""
