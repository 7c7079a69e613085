"""ROC, precision against recall, and the confusion matrix as pictures for a paper."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outcore.figure import COLOURS, DASHES, SMALL, Axes, Span, document, legend, line, rectangle, text
from outcore.report.evaluation import Evaluation, EvaluationCurve
from outcore.report.graph_drawing.labels import text_width
from outcore.report.graph_drawing.shading import mixed

__all__ = ["confusion_svg", "curves_svg"]

_SIDE, _LEFT, _TOP, _RIGHT = 320.0, 66.0, 36.0, 20.0
_EACH = ("blue", "orange", "green", "vermillion", "purple", "sky")


def curves_svg(curves: Sequence[EvaluationCurve], *, kind: str) -> str:
    """ROC (``kind="roc"``) or precision against recall, a line for each class with its interval behind it."""
    roc = kind == "roc"
    x, y = ("false positive rate", "true positive rate") if roc else ("recall", "precision")
    axes = Axes(_LEFT, _TOP, _SIDE, _SIDE, Span(0.0, 1.0, x), Span(0.0, 1.0, y))
    title = "ROC" if roc else "Precision against recall"
    out = [text(_LEFT, 20, f"{title} (bands: 95 % intervals)", "title"), *axes.drawn()]
    if roc:
        out.append(line(*axes.at(0.0, 0.0), *axes.at(1.0, 1.0), "grid"))
    entries = []
    shown = [c for c in curves if not math.isnan(c.area)][: len(_EACH)]
    for curve, colour, dash in zip(shown, _EACH, DASHES, strict=False):
        grid = [i / (len(curve.y) - 1) for i in range(len(curve.y))]
        band = [axes.at(*p) for p in zip(grid, curve.high, strict=True)]
        band += [axes.at(*p) for p in reversed(list(zip(grid, curve.low, strict=True)))]
        places = " ".join(f"{px:.1f},{py:.1f}" for px, py in band)
        out.append(f'<polygon points="{places}" fill="{COLOURS[colour]}" opacity="0.18"/>')
        out.append(axes.path(zip(grid, curve.y, strict=True), colour, dash=dash))
        area = "AUC" if roc else "AP"
        interval = f"{curve.area:.2f} ({curve.area_low:.2f} to {curve.area_high:.2f})"
        entries.append((colour, f"{curve.name}: {area} {interval}"))
    drawn, end = legend(entries, _LEFT, _TOP + _SIDE + 60, _SIDE)
    return document(_LEFT + _SIDE + _RIGHT, end + 6, [*out, *drawn])


def confusion_svg(found: Evaluation) -> str:
    """True classes down, predicted ones across; shaded by the share of the true class."""
    widest = max(text_width(name, SMALL) for name in found.classes)
    cell = max(30.0, min(84.0, 252.0 / len(found.classes)))
    level = widest + 6 <= cell
    beside, top, size = widest + 42, 36.0, cell * len(found.classes)
    out = [text(12, 20, f"Accuracy {_interval(found)}", "title")]
    middle = f"{top + size / 2:.1f}"
    out.append(f'<g transform="rotate(-90 15 {middle})">{text(15, top + size / 2, "true class", "middle")}</g>')
    for i, (name, row, total) in enumerate(zip(found.classes, found.confusion, found.counts, strict=True)):
        out.append(text(beside - 8, top + cell * (i + 0.5) + 4, name, "small end"))
        at = beside + cell * (i + 0.5), top + size + 16
        below = text(*at, name, "small middle" if level else "small end")
        out.append(below if level else f'<g transform="rotate(-45 {at[0]:.1f} {at[1]:.1f})">{below}</g>')
        for j, number in enumerate(row):
            share = number / total if total else 0.0
            x, y = beside + cell * j, top + cell * i
            out.append(rectangle(x, y, cell, cell, mixed(share), f"{name} as {found.classes[j]}: {number}"))
            words = text(x + cell / 2, y + cell / 2 + 4, str(number), "small middle")
            out.append(words.replace("<text", '<text style="fill:#ffffff"', 1) if share > 0.55 else words)
    end = top + size + (22 if level else 0.71 * widest + 26)
    out.append(text(beside + size / 2, end + 14, "predicted class", "middle"))
    return document(max(beside + size + 20, _LEFT + _SIDE + _RIGHT), end + 26, out)


def _interval(found: Evaluation) -> str:
    return f"{found.accuracy:.2f} ({found.accuracy_low:.2f} to {found.accuracy_high:.2f})"
