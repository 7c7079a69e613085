"""How kernels that go through rows of numbers are cut: what is known of it without a device.

A program holds a tile of whole rows, or of a part of their width. In backward every program goes through several tiles
and adds up its part of the sums over all rows; the parts are memory that plans have to know of.
"""

from __future__ import annotations

__all__ = ["PROGRAMS", "TILE", "parts_bytes"]

TILE = 4096
"""Numbers that a program holds at a time."""
PROGRAMS = 1056
"""Of backward, at most: more would only leave more to add up."""


def parts_bytes(numbers: int, width: int, sums: int) -> int:
    """Bytes of the parts of so many sums over rows of a width, with their totals."""
    rows = max(1, TILE >> (width - 1).bit_length())
    return 4 * sums * width * (min(PROGRAMS, -(-numbers // (width * rows))) + 1)
