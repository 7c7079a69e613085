"""Static checks of programs."""
