"""What a streamed model is called with: tensors, and images that are read lazily.

For recording, each of them is represented by a fake tensor without memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from outcore.graph.structure import replace_lazy_images, substitute
from outcore.stream.source import StreamedImage, image_of


@dataclass(frozen=True)
class LazyImage:
    """A lazy image, and the fake tensor that represents it while recording."""

    image: StreamedImage
    stand_in: torch.Tensor


def with_lazy_images(tree: Any) -> Any:
    """Replace lazy images in the arguments."""

    def change(source: Any) -> LazyImage:
        image = image_of(source)
        return LazyImage(image, torch.empty(image.shape, dtype=image.dtype, device="meta"))

    return replace_lazy_images(tree, change)


@functools.lru_cache(maxsize=64)
def _without_memory(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta").requires_grad_(requires_grad)


def with_fake_tensors(tree: Any) -> Any:
    """The arguments with fake tensors in place of all images and tensors."""

    def stand_in(leaf: Any) -> torch.Tensor:
        if isinstance(leaf, LazyImage):
            return leaf.stand_in
        return _without_memory(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)

    return substitute(tree, (torch.Tensor, LazyImage), stand_in)


def whole_image(image: StreamedImage, device: torch.device) -> torch.Tensor:
    """All of an image, as the model sees it."""
    region = tuple((0, n) for n in image.shape)
    return image.prepare(image.read(region).to(device))


def is_shape(value: Any) -> bool:
    """Whether an argument is a shape given in place of a tensor."""
    return isinstance(value, tuple) and all(isinstance(n, int) for n in value)
