"""A small picture of a slide in the terminal: two pixels to a character."""

from __future__ import annotations

from rich.style import Style
from rich.text import Text
from torch.nn import functional as F

from outcore.data import Slide

__all__ = ["thumbnail"]


def thumbnail(slide: Slide, *, columns: int = 32) -> Text:
    """The coarsest level as coloured half blocks; each character shows one pixel above another."""
    channels, height, width = slide.at(level=len(slide.levels) - 1).shape
    source = slide.at(level=len(slide.levels) - 1)
    pixels = source.read([(0, channels), (0, height), (0, width)]).float()
    rows = max(2, round(columns * height / width / 2) * 2)
    if channels == 1:
        pixels = pixels.expand(3, -1, -1)
    small = F.interpolate(pixels[None], (rows, columns), mode="area")[0].round().int()
    text = Text()
    for y in range(0, rows, 2):
        for x in range(columns):
            above, below = (small[:, row, x].tolist() for row in (y, y + 1))
            style = Style(color=_hex(above), bgcolor=_hex(below))
            text.append("▀", style)
        text.append("\n")
    text.right_crop(1)
    return text


def _hex(colour: list[int]) -> str:
    return "#" + "".join(f"{min(255, max(0, value)):02x}" for value in colour)
