"""What a picture consists of, with coordinates in pixels: boxes and frames, wires, labels."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["GEOMETRY", "Drawing", "End", "Label", "Placed", "WireSegment"]

GEOMETRY = {
    "row_gap": 22.0,  # between rows
    "bend": 0.06,  # and more for each pixel that a wire moves sideways there,
    "bend_most": 34.0,  # up to this
    "box_gap": 22.0,  # between boxes of a row
    "lane_gap": 11.0,  # between wires
    "port_gap": 12.0,  # between the ends of wires at a box
    "pad": 14.0,  # between a frame and what is in it
    "header": 26.0,  # height of the title of a frame
    "margin": 9.0,  # beside that title
    "label": 14.0,  # height of a shape label
    "label_gap": 5.0,  # between it and its wire
    "sheet": 4.0,  # how far the sheet behind a repeated box sticks out
    "inset": 8.0,  # between the corner of a box and the wires that end at it
    "pill": 22.0,  # height of an input or output
    "pill_pad": 12.0,  # beside its name
}
"""Sizes; the page gets them from here."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A box, or the frame of an open container."""

    part: str
    x: float
    y: float
    width: float
    height: float
    repeat: int
    """How many identical parts it stands for."""
    open: bool
    free: float = 0.0
    """Of a frame: the room left of the wires that enter it, for its title."""


@dataclass(frozen=True, slots=True)
class WireSegment:
    """A piece of wire: from y1 down to y2, sideways from x1 to x2 on the way to y3, down to y4."""

    wire: int
    port: int
    """The wire as which it leaves its source: another one where that stands for several."""
    x1: float
    x2: float
    y1: float
    y2: float
    y3: float
    y4: float
    skip: bool
    source: str = ""
    """The part where it begins; empty for a piece that begins on the way."""
    target: str = ""
    """The part where it ends, with an arrow unless that is open."""
    arrow: bool = False


@dataclass(frozen=True, slots=True)
class Label:
    """The shape of a value, beside the start of its wire."""

    wire: int
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class End:
    """An input or output of the model."""

    wire: int
    x: float
    y: float
    width: float
    height: float


@dataclass(slots=True)
class Drawing:
    """A picture; frames come before what is in them."""

    width: float
    height: float
    placed: list[Placed] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    lines: list[WireSegment] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
