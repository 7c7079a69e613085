"""What a network returned in a validation, on its way from the last stage's ranks to the first, where metrics are made.

Ranks share JSON. Scores of classes are few numbers and go as they are; of a map that a segmentation network makes goes
the class of every pixel, compressed, which is all that Dice and accuracy look at. What is larger stays where it is.
"""

from __future__ import annotations

import base64
import math
import zlib
from typing import Any

import torch
from torch import Tensor

from outcore.train.metrics import classes_of

__all__ = ["packed", "unpacked"]

_MOST_NUMBERS = 1 << 16
"""Numbers of an output that are shared as they are."""
_MOST_PIXELS = 1 << 24
"""Pixels of a map whose classes are shared."""


def packed(output: Any, targets: Any) -> dict[str, Any] | None:
    """An output as JSON can hold it; None for what is no tensor, or too large."""
    if not isinstance(output, Tensor):
        return None
    if output.numel() <= _MOST_NUMBERS:
        return {"numbers": output.tolist()}
    pixels = math.prod((output.shape[0], *output.shape[2:]))
    of_classes = isinstance(targets, Tensor) and not targets.is_floating_point() and output.ndim > 2
    if not of_classes or pixels > _MOST_PIXELS or output.shape[1] > 256:
        return None
    classes = classes_of(output).to(torch.uint8).cpu().contiguous().numpy().tobytes()
    return {"classes": base64.b64encode(zlib.compress(classes, 1)).decode(), "shape": list(output.shape)}


def unpacked(said: dict[str, Any]) -> Tensor:
    """The output; of a map scores of which the class that was sent has the largest."""
    if "numbers" in said:
        return torch.tensor(said["numbers"], device="cpu")
    images, channels, *sides = said["shape"]
    found = bytearray(zlib.decompress(base64.b64decode(said["classes"])))
    classes = torch.frombuffer(found, dtype=torch.uint8).reshape(images, 1, *sides).long()
    if channels == 1:
        return 2.0 * classes - 1
    return torch.zeros(images, channels, *sides, device="cpu").scatter_(1, classes, 1.0)
