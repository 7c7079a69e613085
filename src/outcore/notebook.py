"""How values show themselves in a notebook.

A notebook asks a value for ``_repr_html_``. What draws a graph or a plan lies above the packages in which they are
defined, so they ask here, and the function is looked up by its name when a notebook does: nothing is imported before.
"""

from __future__ import annotations

from importlib import import_module

_MODULE = "outcore.explore.notebook_display"
_FUNCTIONS = {"Graph": "graph_html", "Costs": "costs_html", "Plan": "plan_html", "Timeline": "timeline_html"}


def html_of(value: object) -> str:
    """A value as HTML, for ``_repr_html_``."""
    shown: str = getattr(import_module(_MODULE), _FUNCTIONS[type(value).__name__])(value)
    return shown
