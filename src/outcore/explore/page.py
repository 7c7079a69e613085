"""The page as HTML: a skeleton, style sheets and scripts (``assets/``) put together around a bundle.

The same page is exported with everything in it, and served live, where it begins empty and is sent what is known and
then the rest. Its policy (in the head) lets the browser run this one script, by its hash, and nothing else: a name, a
docstring or a line of source that contains HTML cannot run, wherever it is shown. The exported page loads nothing at
all; the live one may talk to the server it came from.

The network's drawing is the one of `outcore graph --html`: those scripts are taken from there.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from outcore.report.page import embedded

__all__ = ["explore_page"]

SHARED = (
    "layout.js",
    "picture.js",
    "details.js",
    "search.js",
    "camera.js",
    "hand.js",
    "graph.js",
    "charts.js",
    "run.js",
)
"""Scripts of `outcore.report`, in the order they are run."""
SCRIPTS = (
    *("text.js", "store.js", "svg_axes.js", "predictions.js", "overview.js", "frontier.js", "code.js", "network.js"),
    *("breakdown.js", "timeline.js", "timeline_lanes.js", "plan.js", "run_panel.js", "live.js", "explore.js"),
)
STYLES = ("base.css", "panels.css")


def explore_page(bundle: Mapping[str, Any], *, live: bool = False) -> str:
    """A page that shows a bundle, as HTML.

    Args:
        bundle: what `explore_bundle` made; may be empty for a live page.
        live: whether the page asks the server it came from for more.
    """
    script = "\n".join([*(_shared(name) for name in SHARED), *(_asset(name) for name in SCRIPTS)])
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    parts = {
        "title": escape(str(bundle.get("title", "outcore"))),
        "connect": "'self'" if live else "'none'",
        "digest": digest,
        "style": "\n".join([_shared("page.css"), *(_asset(name) for name in STYLES)]),
        "graph_panel": _graph_panel(),
        "live": "true" if live else "false",
        "bundle": embedded(dict(bundle)),
        "script": script,
    }
    pieces = _asset("explore.html").split("{{")
    out = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        out += [parts[name], rest]
    return "".join(out)


def _graph_panel() -> str:
    """The template of the network's drawing, from the page of `outcore graph`."""
    html = _shared("page.html")
    begin = html.index('<template id="graph-panel">')
    return html[begin : html.index("</template>", begin) + len("</template>")]


def _asset(name: str) -> str:
    return (files("outcore.explore") / "assets" / name).read_text(encoding="utf-8")


def _shared(name: str) -> str:
    return (files("outcore.report") / "page" / name).read_text(encoding="utf-8")
