"""Recording: one observed run of an unmodified model, recorded and replayed."""
