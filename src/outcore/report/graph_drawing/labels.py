"""The words in the pictures: short forms of numbers, shapes and layer settings, and how wide they are.

A picture has no room for ``kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), bias=False``; ``3×3 /2`` says
what a reader looks for. Widths of text are computed here, once, with the widest of the usual sans-serif
fonts, because a static SVG is drawn with whatever font the reader has: text may end early in its box but
never runs out of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from outcore.ops.registry import kinds

__all__ = [
    "KINDS",
    "count",
    "kind_of",
    "settings",
    "shape_label",
    "shorten",
    "summary",
    "text_width",
]

KINDS = {
    "convolution": "conv",
    "attention": "attention scaled_dot_product",
    "norm": "norm",
    "activation": " ".join((*kinds("activation", "gated activation", "softmax", "dropout"), "pool")),
    "linear": "linear matmul bmm addmm einsum embedding lstm gru rnn",
    "combine": "add cat concat mul sub stack iadd sum div maximum minimum",
}
"""Kind of layer, which decides its colour, and the words that tell it in the name of a class or function.

The first kind that fits is taken; words of the last are whole names (``addcmul`` is no addition)."""

OTHER = "other"

# Advance widths in em of DejaVu Sans and Verdana, the widest of the usual fonts, by letters; else 0.64.
_WIDTHS = {
    **dict.fromkeys("ijlI|'", 0.30),
    **dict.fromkeys(" .,:;!-/\\()[]frt·J", 0.40),
    **dict.fromkeys("cszvxykLTF_1", 0.62),
    **dict.fromkeys("wACDGHNOQRUKVXY#+<>=~×→", 0.85),
    **dict.fromkeys("mMW@%…", 1.0),
}
_BOLD = 1.1


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """An upper bound of the width of a line of text in pixels."""
    return round(size * sum(_WIDTHS.get(letter, 0.64) for letter in text) * (_BOLD if bold else 1.0), 1)


def shorten(text: str, size: float, width: float, *, bold: bool = False) -> str:
    """The text, or its beginning with an ellipsis, so that it is no wider than `width`."""
    if text_width(text, size, bold=bold) <= width:
        return text
    while text and text_width(text + "…", size, bold=bold) > width:
        text = text[:-1]
    return text.rstrip(" .,_") + "…"


def count(number: int) -> str:
    """A number of parameters in at most five characters: ``9408 -> "9.4k"``."""
    for unit, name in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= 0.9995 * unit:
            scaled = number / unit
            return f"{scaled:.3g}{name}" if scaled < 999.5 else f"{scaled:.0f}{name}"
    return str(number)


def shape_label(shape: Sequence[int], batch: int | None = None) -> str:
    """A shape as ``64×112×112``, the batch left out where it leads; ``[in brackets]`` where it does not."""
    if batch is not None and shape and shape[0] == batch:
        return "×".join(map(str, shape[1:])) or "scalar"
    text = "×".join(map(str, shape)) or "scalar"
    return text if batch is None or not shape else f"[{text}]"


def kind_of(type_name: str) -> str:
    """Kind of a layer, by the name of its class or function."""
    name = type_name.lower().rstrip("_")
    for kind, words in KINDS.items():
        known = words.split()
        if name in known or (kind != "combine" and any(word in name for word in known)):
            return kind
    return OTHER


def settings(detail: str) -> dict[str, str]:
    """What ``print(module)`` shows in brackets, by name; positional settings are named ``"0"``, ``"1"``."""
    parts = re.findall(r"(?:\([^()]*\)|\[[^\[\]]*\]|'[^']*'|[^,()\[\]'])+", detail)
    found: dict[str, str] = {}
    for i, part in enumerate(parts):
        key, sign, text = part.partition("=")
        found[key.strip() if sign else str(i)] = (text if sign else part).strip()
    return found


def summary(type_name: str, detail: str) -> str:
    """The settings of a layer that a reader looks for, ``"3→64 7×7 /2"``; empty if none is short."""
    given = settings(detail)
    words = []
    if "in_features" in given and "out_features" in given:
        words.append(f"{given['in_features']}→{given['out_features']}")
    elif given.get("0", "").isdigit() and given.get("1", "").isdigit() and kind_of(type_name) != "norm":
        words.append(f"{given['0']}→{given['1']}")
    if size := _size(given.get("kernel_size", "")):
        words.append("×".join(size) if len(size) > 1 else f"{size[0]}×{size[0]}")
    if (stride := _size(given.get("stride", ""))) and set(stride) != {"1"}:
        words.append("/" + (stride[0] if len(set(stride)) == 1 else "×".join(stride)))
    if (dilation := _size(given.get("dilation", ""))) and set(dilation) != {"1"}:
        words.append(f"dil {dilation[0]}")
    if given.get("groups", "1") != "1":
        words.append(f"g{given['groups']}")
    if "output_size" in given and (size := _size(given["output_size"])):
        words.append("to " + "×".join(size))
    if "scale_factor" in given and (size := _size(given["scale_factor"])):
        words.append("×" + size[0].removesuffix(".0"))
    if "p" in given:
        words.append(f"p={given['p']}")
    return " ".join(words)


def _size(text: str) -> list[str]:
    """The numbers of ``(3, 3)`` or ``3``."""
    return re.findall(r"[\d.]+", text)
