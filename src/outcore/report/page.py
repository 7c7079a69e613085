"""The page: one HTML file that shows a bundle, with everything in it and nothing loaded from anywhere.

The page is hand-written (``page/``): a skeleton, a style sheet and a few scripts, put together here around
the bundle. A policy in its head forbids the browser to load anything at all, so a report can be opened years
later, offline, or be sent to someone else, and shows the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from outcore.errors import OutcoreError
from outcore.report.bundle import FORMAT

__all__ = ["page"]

SCRIPTS = (
    *("layout.js", "picture.js", "details.js", "search.js"),
    *("camera.js", "hand.js", "graph.js", "charts.js", "run.js", "page.js"),
)
"""In the order they are run."""


def page(bundle: Mapping[str, Any]) -> str:
    """A page that shows a bundle, as HTML.

    Path("net.html").write_text(page(bundle(outcore.capture(model, images))))
    """
    if bundle.get("format") != FORMAT:
        raise OutcoreError(f"this bundle has format {bundle.get('format')!r}; this outcore shows format {FORMAT}")
    parts = {
        "title": escape(str(bundle["title"])),
        "style": _asset("page.css") + _asset("run.css"),
        "bundle": embedded(bundle),
        "script": "\n".join(_asset(name) for name in SCRIPTS),
    }
    html = _asset("page.html")
    pieces = html.split("{{")
    out = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        out += [parts[name], rest]
    return "".join(out)


def embedded(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files("outcore.report") / "page" / name).read_text(encoding="utf-8")
