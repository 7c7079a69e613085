"""The curves of a sweep as a picture: loss against steps, one line per trial, the best in front.

Up to six trials have a colour each, named by their settings, and are broken differently, so that equal ones show
through each other; of more, colours mean what became of them. A few losses far above all others would press the rest
into a line at the bottom: the axis then ends where 98 % of the losses lie, lines leave the picture there, and how many
do is said. It is logarithmic where losses are far apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outcore.figure import DASHES, Axes, Span, document, legend, text
from outcore.fusion.sweep.trials import TrialResult
from outcore.machine.units import counted

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 560, 400, 66, 54, 20, 82
_EACH = ("blue", "orange", "green", "vermillion", "purple", "sky")
_COLOURS = {"complete": "sky", "running": "green", "pruned": "grey", "diverged": "vermillion"}


def draw_curves(results: Sequence[TrialResult]) -> str:
    """An SVG."""
    shown = [r for r in results if r.curve]
    if not shown:
        return document(_WIDTH, _HEIGHT, [text(12, 20, "no trial has made a step yet", "title")])
    losses = sorted(v for r in shown for _, v in r.curve)
    low, high = losses[0], losses[min(len(losses) - 1, round(0.98 * len(losses)))]
    log = low > 0 and high / low > 20
    if _distance(low, losses[-1], log) <= 2 * _distance(low, high, log):
        high = losses[-1]
    room = 0.04 * (high - low or abs(high) or 1.0)
    ends = (low / 1.1, high * 1.1) if log else (low - room, high + room)
    axes = Axes(
        _LEFT,
        _TOP,
        _WIDTH - _LEFT - _RIGHT,
        _HEIGHT - _TOP - _BOTTOM,
        Span(0, max(r.curve[-1][0] for r in shown), "step"),
        Span(*ends, "training loss" + (" (logarithmic)" if log else ""), log),
    )
    best = min(shown, key=lambda r: (r.state != "complete", r.value if r.value is not None else float("inf")))
    loss = "" if best.value is None else f", loss {best.value:.4g}"
    said = f"{len(shown)} trial{'s' if len(shown) > 1 else ''}; best: trial {best.number}{loss}"
    above = sum(any(v > ends[1] for _, v in r.curve) for r in shown)
    beyond = f"{counted(above, 'trial')} {'goes' if above == 1 else 'go'} above the axis" if above else ""
    under = "; ".join(filter(None, (_settings(best), beyond)))
    out = [text(12, 20, said, "title"), text(12, 38, under, "small quiet"), *axes.drawn()]
    each = {r.number: colour for r, colour in zip(shown, _EACH, strict=False)} if len(shown) <= len(_EACH) else {}
    dashes = dict(zip(each, DASHES, strict=False))
    for one in sorted(shown, key=lambda r: (r is best) != bool(each)):  # broken ones over the best
        own = each.get(one.number) or ("blue" if one is best else _COLOURS.get(one.state, "grey"))
        hint = f"trial {one.number}: {_settings(one)}"
        dash = "" if one is best else dashes.get(one.number) or (DASHES[1] if each else "")
        out.append(axes.path(one.curve, own, width=3.0 if one is best else 1.3, hint=hint, dash=dash))
        if len(one.curve) == 1 and one.curve[0][1] <= ends[1]:
            out.append(axes.point(*one.curve[0], own))
    states = [s for s in _COLOURS if any(r.state == s and r is not best for r in shown)]
    entries = [("blue", "best"), *((_COLOURS[s], s) for s in states)]
    if each:
        entries = [(each[r.number], _settings(r) or f"trial {r.number}") for r in shown]
    drawn, end = legend(entries, _LEFT, _HEIGHT - 26, _WIDTH - _LEFT)
    return document(_WIDTH, end + 6, [*out, *drawn])


def _distance(low: float, high: float, log: bool) -> float:
    return math.log(high / low) if log else high - low


def _settings(one: TrialResult) -> str:
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in one.settings.items())
