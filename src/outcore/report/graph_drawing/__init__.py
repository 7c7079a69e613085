"""Graphs as layered drawings: nested boxes, rows, columns, wires, SVG."""
