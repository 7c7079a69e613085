"""The claims of the README: each with its stored results, how its figure comes from them, and a short rerun."""
