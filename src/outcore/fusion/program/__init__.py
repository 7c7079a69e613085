"""One recorded training step, replayed for many members at once."""
