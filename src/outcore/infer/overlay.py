"""A picture of a slide with its mask laid over it, small enough to look at.

The slide is read from the coarsest level that is large enough, in bands of rows, so that memory stays bounded also
where a file has only its finest level. The first class, mostly the background, is not coloured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from outcore.data import Slide
from outcore.data.source import Source
from outcore.infer.disk_array import DiskArray
from outcore.infer.palette import class_colours

__all__ = ["can_draw", "slide_thumbnail", "write_overlay"]

Pixels = np.ndarray[Any, Any]

_SIDE = 1024
_BAND_BYTES = 4 << 20
_OPACITY = 0.5
_LINE = 22
"""Height of a line of the legend."""


def can_draw(slide: Slide) -> bool:
    """Whether there is a picture: an image of two dimensions, and Pillow."""
    return len(slide.levels[0].size) == 2 and find_spec("PIL") is not None


def slide_thumbnail(slide: Slide, side: int = _SIDE) -> Pixels:
    """A slide as (y, x, 3) bytes, its longer side at most `side`."""
    fits = [n for n, level in enumerate(slide.levels) if max(level.size) >= side]
    source = slide.at(level=fits[-1] if fits else 0)
    channels, height, width = source.shape
    scale = min(1.0, side / max(height, width))
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    band = max(1, _BAND_BYTES // (4 * channels * width))
    step = max(1, int(band * scale))
    made = [_band(source, top, min(rows, top + step), rows, columns) for top in range(0, rows, step)]
    return _bytes(torch.cat(made, 1), slide)


def _band(source: Source, top: int, bottom: int, rows: int, columns: int) -> torch.Tensor:
    """Rows of the thumbnail, each the mean of the area it covers."""
    channels, height, width = source.shape
    begin, end = top * height // rows, max(top * height // rows + 1, math.ceil(bottom * height / rows))
    pixels = source.read([(0, channels), (begin, min(height, end)), (0, width)])
    return F.interpolate(pixels[None].float(), (bottom - top, columns), mode="area")[0]


def _bytes(pixels: torch.Tensor, slide: Slide) -> Pixels:
    """Three channels of bytes; numbers that are none are stretched over what occurs."""
    if slide.layout.dtype != np.uint8:
        low, high = pixels.min(), pixels.max()
        pixels = (pixels - low) / (high - low).clamp(min=1e-12) * 255
    pixels = pixels[:3] if pixels.shape[0] >= 3 else pixels[:1].expand(3, -1, -1)
    made: Pixels = np.ascontiguousarray(pixels.round().clamp(0, 255).byte().permute(1, 2, 0).numpy())
    return made


def write_overlay(
    path: Path, slide: Slide, mask: Pixels | DiskArray, names: Sequence[str], shares: Sequence[float], *, shown: int = 8
) -> None:
    """Write a PNG: the slide, coloured by the class of each pixel, and a legend with the share of each class.

    Args:
        path: the file.
        slide: what was looked at.
        mask: the class of each pixel, in memory or in a file.
        names: of the classes.
        shares: of the pixels, by class.
        shown: classes in the legend, the most frequent.
    """
    from PIL import Image, ImageDraw

    picture = slide_thumbnail(slide)
    height, width, _ = picture.shape
    rows, columns = (
        ((np.arange(n) + 0.5) * m / n).astype(int) for n, m in zip((height, width), mask.shape, strict=True)
    )
    colours = class_colours(len(names))
    for line, row in enumerate(rows):
        classes = mask[row][columns]
        opacity = np.where(classes == 0, 0.0, _OPACITY)[:, None]
        picture[line] = (picture[line] * (1 - opacity) + colours[classes] * opacity).round()
    listed = [int(n) for n in np.argsort(-np.asarray(shares), kind="stable")[:shown] if shares[n] > 0]
    canvas = Image.new("RGB", (max(width, 200), height + _LINE * len(listed) + 6), "white")
    canvas.paste(Image.fromarray(picture), (0, 0))
    draw = ImageDraw.Draw(canvas)
    for line, number in enumerate(listed):
        top = height + 6 + line * _LINE
        draw.rectangle((6, top, 20, top + 14), fill=tuple(colours[number].tolist()), outline="black")
        draw.text((28, top), f"{_printable(names[number])}: {100 * shares[number]:.1f} %", fill="black", font_size=13)
    canvas.save(path, "PNG")


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)
