"""How kernels that go through rows of numbers are cut: what is known of it without a device.

A program holds a tile of whole rows, or of a part of their width. In backward every program goes through several tiles
and adds up its part of the sums over all rows; the parts are memory that plans have to know of.
"""

from __future__ import annotations

TILE = 4096
"""Numbers that a program holds at a time."""
_FEWEST, _MOST, _EACH = 264, 1056, 4
"""Programs that fill a device, programs at most, and tiles that each has before there are more: parts take room, and
have to be added up."""


def programs(tiles: int) -> int:
    """Of backward, for so many tiles."""
    return min(tiles, _MOST, max(_FEWEST, -(-tiles // _EACH)))


def parts_bytes(numbers: int, width: int, sums: int) -> int:
    """Bytes of the parts of so many sums over rows of a width, with their totals."""
    rows = max(1, TILE >> (width - 1).bit_length())
    return 4 * sums * width * (programs(-(-numbers // (width * rows))) + 1) if sums else 0
