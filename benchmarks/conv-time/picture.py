"""Predicted against measured, as a hand-written SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

_COLOURS = {"talks": "#d1495b", "family-held-out": "#00798c", "held-out": "#b8b8b8"}
_LABELS = {
    "talks": "the talks' convolutions",
    "family-held-out": "held-out convolutions like the talks'",
    "held-out": "held-out convolutions of any kind",
}
_SIDE, _MARGIN = 520, 60


def scatter(points: Sequence[tuple[str, float, float]], *, title: str) -> str:
    """Points of (set, measured ms, predicted ms) on two logarithmic axes; the band is 20 per cent either
    way."""
    values = [value for _, measured, predicted in points for value in (measured, predicted)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def place(value: float) -> float:
        return _SIDE * (math.log10(value) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIDE + 2 * _MARGIN} {_SIDE + 2 * _MARGIN}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_MARGIN}" y="{_MARGIN - 30}" font-size="15">Convolution times: {title}</text>',
        f'<g transform="translate({_MARGIN} {_MARGIN + _SIDE}) scale(1 -1)">',
        _band(low, high),
    ]
    for name in ("held-out", "family-held-out", "talks"):
        dots = [
            f'<circle cx="{place(measured):.1f}" cy="{place(max(predicted, 10**low)):.1f}" r="2.4"/>'
            for group, measured, predicted in points
            if group == name
        ]
        parts.append(f'<g fill="{_COLOURS[name]}" fill-opacity="0.75">{"".join(dots)}</g>')
    parts.append("</g>")
    for power in range(low, high + 1):
        at = place(10**power)
        label = f"{10**power:g} ms"
        parts.append(f'<text x="{_MARGIN + at:.1f}" y="{_MARGIN + _SIDE + 18}" text-anchor="middle">{label}</text>')
        parts.append(f'<text x="{_MARGIN - 6}" y="{_MARGIN + _SIDE - at + 4:.1f}" text-anchor="end">{label}</text>')
    axes = "measured across, predicted upwards; the band is 20 % either way"
    parts.append(f'<text x="{_MARGIN + _SIDE / 2}" y="{_MARGIN + _SIDE + 40}" text-anchor="middle">{axes}</text>')
    for row, (name, label) in enumerate(_LABELS.items()):
        y = _MARGIN + 16 + 18 * row
        parts.append(f'<circle cx="{_MARGIN + 14}" cy="{y - 4}" r="4" fill="{_COLOURS[name]}"/>')
        parts.append(f'<text x="{_MARGIN + 24}" y="{y}">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _band(low: int, high: int) -> str:
    edge = _SIDE * math.log10(1.2) / (high - low)
    corners = f"0,{edge:.1f} {_SIDE},{_SIDE + edge:.1f} {_SIDE},{_SIDE - edge:.1f} 0,{-edge:.1f}"
    return (
        f'<rect width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#888"/>'
        f'<polygon points="{corners}" fill="#eee"/><path d="M0 0L{_SIDE} {_SIDE}" stroke="#444"/>'
    )
