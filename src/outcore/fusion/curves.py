"""The curves of a sweep as a picture: loss against steps, one line per trial, the best in front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from outcore.fusion.trials import Result

__all__ = ["draw_curves"]

_WIDTH, _HEIGHT, _MARGIN = 720, 400, 48
_COLOURS = {"complete": "#4a7bd0", "pruned": "#b9bec8", "diverged": "#d07a4a", "running": "#8aa4cf"}


def draw_curves(results: Sequence[Result]) -> str:
    """An SVG; the loss axis is logarithmic where all losses are positive and far apart."""
    shown = [r for r in results if r.curve]
    if not shown:
        return f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}"/>'
    losses = sorted(v for r in shown for _, v in r.curve)
    low, high = losses[0], losses[min(len(losses) - 1, round(0.98 * len(losses)))]
    log = low > 0 and high / low > 20
    last = max(r.curve[-1][0] for r in shown)

    def place(step: int, value: float) -> str:
        scaled = [math.log(max(v, low)) if log else v for v in (value, low, high)]
        share = (min(scaled[0], scaled[2]) - scaled[1]) / max(1e-12, scaled[2] - scaled[1])
        x = _MARGIN + step / last * (_WIDTH - 2 * _MARGIN)
        return f"{x:.1f},{_HEIGHT - _MARGIN - share * (_HEIGHT - 2 * _MARGIN):.1f}"

    best = min((r for r in shown if r.value is not None), key=lambda r: (r.state != "complete", r.value or 0.0))
    lines = [
        f'<polyline fill="none" stroke="{_COLOURS.get(r.state, "#888")}" stroke-width="{3 if r is best else 1}" '
        f'points="{" ".join(place(s, v) for s, v in r.curve)}">'
        f"<title>trial {r.number}: {escape(str(r.settings))}</title></polyline>"
        for r in sorted(shown, key=lambda r: r is best)
    ]
    labels = [
        (4, _MARGIN, f"{high:.3g}"),
        (4, _HEIGHT - _MARGIN, f"{low:.3g}"),
        (_MARGIN, _HEIGHT - 12, "0"),
        (_WIDTH - 2 * _MARGIN, _HEIGHT - 12, f"{last} steps"),
        (_MARGIN, 20, f"best: trial {best.number}, {best.settings}, loss {best.value:.4g}"),
    ]
    texts = [f'<text x="{x}" y="{y}" font-family="sans-serif" font-size="12">{escape(t)}</text>' for x, y, t in labels]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *lines, *texts, "</svg>"])
