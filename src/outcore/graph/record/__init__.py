"""Recording: one run of an unmodified model, watched, written down, and run again."""
