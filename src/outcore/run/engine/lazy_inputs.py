"""Inputs that are not in memory: slides and other sources in place of tensors.

For everything that is agreed on between ranks a source is a tensor without content, of its shape and dtype. Where the
image is shared by a grid of ranks each reads the region that its part needs, when its forward begins; where a rank
needs the whole of it, all is read at once.
"""

from __future__ import annotations

from typing import Any

import torch

from outcore.data import Source
from outcore.graph.structure import replace_lazy_images
from outcore.stream.source import ImageRows, StreamedImage, image_of

__all__ = ["Images", "in_memory", "rows_of_sources", "stand_ins"]

Images = dict[int, StreamedImage]
"""By the id of the tensor that stands for it."""


def stand_ins(inputs: Any) -> tuple[Any, Images]:
    """The inputs with a tensor without content in place of every source, and which stands for what."""
    images: Images = {}

    def stand_in(source: Source) -> torch.Tensor:
        image = image_of(source)
        made = torch.empty(image.shape, dtype=image.dtype, device="meta")
        images[id(made)] = image
        return made

    return replace_lazy_images(inputs, stand_in), images


def in_memory(inputs: Any) -> Any:
    """The inputs with every source read."""

    def whole(source: Source) -> torch.Tensor:
        image = image_of(source)
        return ImageRows(image, 0, image.shape[0]).to(torch.device("cpu"))

    return replace_lazy_images(inputs, whole)


def rows_of_sources(targets: Any, count: int, first: int, size: int) -> Any:
    """The targets of a micro-batch with some samples of a source in place of every source of a batch of `count`; they
    are read where the loss is taken."""

    def rows(source: Source) -> ImageRows:
        image = image_of(source)
        begin, end = (first, first + size) if image.shape[0] == count else (0, image.shape[0])
        return ImageRows(image, begin, end)

    return replace_lazy_images(targets, rows)
