"""Colours of classes and of probabilities, as a TIFF palette: a number for programs, a colour for people.

A mask of small numbers is black in every viewer. Written with a palette, a pixel still holds its class (or its
probability in 255 steps), and viewers show a colour.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["class_colours", "heat_colours", "tiff_palette"]

Colours = np.ndarray[Any, Any]

_CLASSES = (
    (238, 238, 238),
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (213, 94, 0),
    (204, 121, 167),
    (86, 180, 233),
    (240, 228, 66),
)
"""Grey for the first class, mostly the background, then the colours of Okabe and Ito, which colour-blind people can
tell apart (M. Okabe, K. Ito: *Color universal design*, 2008)."""
_HEAT = ((12, 8, 38), (84, 20, 110), (170, 45, 90), (230, 95, 40), (250, 175, 30), (252, 250, 170))
"""From nothing to certain, ever lighter."""


def class_colours(count: int) -> Colours:
    """A colour for each class, as (count, 3) bytes.

    >>> class_colours(3)[1].tolist()
    [0, 114, 178]
    """
    rounds = np.arange(count) // len(_CLASSES)
    base = np.array(_CLASSES, float)[np.arange(count) % len(_CLASSES)]
    # Each further round is darker, so that more classes than colours still differ.
    made: Colours = (base * (0.75 ** rounds[:, None])).round().astype(np.uint8)
    return made


def heat_colours() -> Colours:
    """256 colours from 0 to 1, as (256, 3) bytes; lighter is more."""
    places = np.linspace(0, 255, len(_HEAT))
    channels = [np.interp(np.arange(256), places, column) for column in np.array(_HEAT, float).T]
    return np.stack(channels, 1).round().astype(np.uint8)


def tiff_palette(colours: Colours) -> Colours:
    """Colours as the tag of a TIFF: three rows of 256 numbers of 16 bits."""
    full = np.zeros((256, 3), np.uint16)
    full[: len(colours)] = colours[:256].astype(np.uint16) * 257
    return np.ascontiguousarray(full.T)
