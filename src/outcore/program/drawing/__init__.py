"""Timelines as pictures: terminal, SVG, Perfetto trace."""
