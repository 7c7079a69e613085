"""Pictures of graphs: a tree for the terminal, an SVG for a paper, a page for the browser."""

from outcore.report.bundle import bundle as bundle
from outcore.report.graph_drawing.svg import svg as svg
from outcore.report.page import page as page
from outcore.report.run import run_bundle as run_bundle
from outcore.report.tree import tree as tree
