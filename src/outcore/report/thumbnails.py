"""A small picture of a slide inside a page: PNG (ISO/IEC 15948), written here because three chunks are all it takes."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import torch
from torch.nn import functional as F

from outcore.data import DataError, open_slide
from outcore.errors import OutcoreError

__all__ = ["png", "thumbnail"]

_MOST_PIXELS = 1 << 24
"""A level that is larger is not read for a thumbnail."""


def thumbnail(path: Path, side: int = 120) -> str | None:
    """A slide as an address that a page shows as an image; None if it cannot be read, or only slowly."""
    try:
        slide = open_slide(path)
        source = slide.at(level=len(slide.levels) - 1)
        channels, height, width = source.shape
        if channels not in (1, 3, 4) or height * width > _MOST_PIXELS:
            return None
        pixels = source.read([(0, channels), (0, height), (0, width)]).float()
    except (DataError, OutcoreError, OSError, ImportError):
        return None
    pixels = pixels.expand(3, -1, -1) if channels == 1 else pixels[:3]
    size = [max(1, round(side * n / max(height, width))) for n in (height, width)]
    small = F.interpolate(pixels[None], size, mode="area")[0].round().clamp(0, 255).to(torch.uint8)
    return "data:image/png;base64," + base64.b64encode(png(small)).decode()


def png(pixels: torch.Tensor) -> bytes:
    """Three channels of bytes as a PNG file."""
    _, height, width = pixels.shape
    rows = pixels.permute(1, 2, 0).contiguous().numpy()
    body = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(body, 9)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
