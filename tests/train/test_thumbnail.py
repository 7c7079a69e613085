"""A slide in the terminal: every character is two pixels, one above the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outcore.train.thumbnail import thumbnail


def slide(pixels: torch.Tensor) -> Any:
    """Two levels, of which the coarser one is small enough to be read."""

    def read(ranges: list[tuple[int, int]]) -> torch.Tensor:
        return pixels[tuple(slice(lo, hi) for lo, hi in ranges)]

    levels = [None, SimpleNamespace(shape=tuple(pixels.shape), read=read)]
    return SimpleNamespace(levels=levels, at=lambda level: levels[level])


@pytest.mark.parametrize("channels", [3, 1])
def test_rows_of_pixels_are_the_upper_and_lower_half_of_characters(channels: int) -> None:
    pixels = torch.zeros(channels, 40, 40, dtype=torch.uint8)
    pixels[:, :10] = 255  # the upper quarter is white
    pixels[0, 30:, 20:] = 128  # the lower right one is half
    shown = thumbnail(slide(pixels), columns=4)
    rows = shown.plain.split("\n")
    assert rows == ["▀" * 4] * 2
    colours = [(span.style.color.name, span.style.bgcolor.name) for span in shown.spans]  # type: ignore[union-attr]
    black, white, grey = "#000000", "#ffffff", "#800000" if channels == 3 else "#808080"
    assert colours == [(white, black)] * 4 + [(black, black)] * 2 + [(black, grey)] * 2


def test_a_slide_keeps_its_proportions() -> None:
    for height, rows in ((40, 16), (80, 32), (1, 1)):
        assert thumbnail(slide(torch.zeros(3, height, 40, dtype=torch.uint8))).plain.count("\n") + 1 == rows
