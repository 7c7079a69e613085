"""Preprocessing inside a model: categories, bins, crops and sizes of images, and augmentation.

`Rescaling` and `Normalization` are with the other normalizations. Layers that augment images do nothing in evaluation,
and neither do their modules; what they draw in training is not carried over, so that a module refuses to run then. What
works on strings has no counterpart among tensors, and is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from outcore.errors import ModelError
from outcore.keras.layers.normalization import torch_dtype
from outcore.keras.part import Part, Site, converts

__all__: list[str] = []

_IN_DATA = "apply it in the data set: dataset.map(lambda x, y: (layer(x), y))"


class Categories(nn.Module):
    """Whole numbers as vectors: one per number, or one per sample with what occurs in it.

    Args:
        depth: the length of a vector; numbers that are not below it, or negative, leave no trace.
        how: ``"one_hot"``, ``"multi_hot"`` or ``"count"``.
        dtype: of the vectors.
    """

    def __init__(self, depth: int, how: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.depth, self.how, self.dtype = depth, how, dtype

    def forward(self, numbers: torch.Tensor, count_weights: torch.Tensor | None = None) -> torch.Tensor:
        """Compare every number with every category."""
        if self.how == "one_hot" and numbers.ndim > 1 and numbers.shape[-1] == 1:
            numbers = numbers.squeeze(-1)
        found = numbers.long().unsqueeze(-1) == torch.arange(self.depth, device=numbers.device)
        if self.how == "one_hot":
            return found.to(self.dtype)
        if self.how == "multi_hot":
            return found.any(1).to(self.dtype)
        found = found.to(self.dtype)
        return (found if count_weights is None else found * count_weights.unsqueeze(-1).to(self.dtype)).sum(1)

    def extra_repr(self) -> str:
        """What it makes."""
        return f"{self.how}, {self.depth}"


def _categories(layer: Any, site: Site, depth: int, dtype: str) -> Categories:
    if layer.sparse:
        site.refuse("sparse=True", "set sparse=False")
    if layer.output_mode not in ("one_hot", "multi_hot", "count"):
        site.refuse(f"output_mode={layer.output_mode!r}", _IN_DATA)
    if layer.output_mode != "one_hot" and site.rank != 2:
        site.refuse(
            f"output_mode={layer.output_mode!r} of an input with {site.rank} dimensions",
            "reshape it to (batch, numbers)",
        )
    return Categories(depth, layer.output_mode, torch_dtype(dtype))


@converts("layers.CategoryEncoding")
def _category_encoding(layer: Any, site: Site) -> Part:
    return Part(_categories(layer, site, layer.num_tokens, layer.dtype))


class Bins(nn.Module):
    """The number of the bin in which a value lies; bins have their lower bound in them."""

    bounds: torch.Tensor

    def __init__(self, bounds: Any, then: nn.Module | None) -> None:
        super().__init__()
        self.register_buffer("bounds", torch.tensor(np.asarray(bounds, dtype="float32")), persistent=False)
        self.then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Search, and encode the numbers if that is wanted."""
        numbers = torch.bucketize(x.contiguous(), self.bounds.to(x.dtype), right=True)
        found: torch.Tensor = numbers.int() if self.then is None else self.then(numbers)
        return found


@converts("layers.Discretization")
def _discretization(layer: Any, site: Site) -> Part:
    if layer.bin_boundaries is None:
        site.refuse("it has no bins", "call adapt() on it first")
    if layer.output_mode == "int":
        return Part(Bins(layer.bin_boundaries, None))
    depth = len(layer.bin_boundaries) + 1
    return Part(Bins(layer.bin_boundaries, _categories(layer, site, depth, layer.output_dtype)))


class Numbered(nn.Module):
    """The place of whole numbers in a vocabulary; those that are not in it have a place of their own."""

    known: torch.Tensor
    places: torch.Tensor

    def __init__(self, places: dict[int, int], other: int, then: nn.Module | None) -> None:
        super().__init__()
        self.other, self.then = other, then
        known = sorted(places)
        self.register_buffer("known", torch.tensor(known, dtype=torch.int64), persistent=False)
        self.register_buffer("places", torch.tensor([places[n] for n in known], dtype=torch.int64), persistent=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Search, and encode the places if that is wanted."""
        numbers = numbers.long().contiguous()
        near = torch.bucketize(numbers, self.known).clamp(max=len(self.known) - 1)
        places = torch.where(self.known[near] == numbers, self.places[near], self.other)
        found: torch.Tensor = places if self.then is None else self.then(places)
        return found


@converts("layers.IntegerLookup")
def _integer_lookup(layer: Any, site: Site) -> Part:
    if layer.invert or layer.num_oov_indices != 1:
        site.refuse(f"invert={layer.invert}, num_oov_indices={layer.num_oov_indices}", _IN_DATA)
    words = [int(word) for word in layer.get_vocabulary(include_special_tokens=False)]
    if not words:
        site.refuse("it has no vocabulary", "call adapt() on it first")
    special = len(layer.get_vocabulary()) - len(words)
    places = {word: number for number, word in enumerate(words, start=special)}
    if layer.mask_token is not None:
        places[int(layer.mask_token)] = 0
    if layer.output_mode == "int":
        return Part(Numbered(places, special - 1, None))
    depth = layer.max_tokens if layer.pad_to_max_tokens else len(words) + special
    dtype = layer._value_dtype
    encoded = _categories(layer, site, depth, dtype.name if hasattr(dtype, "name") else str(dtype))
    return Part(Numbered(places, special - 1, encoded))


class Resize(nn.Module):
    """An image at another size.

    Args:
        size: height and width.
        how: ``"nearest"`` or ``"bilinear"``.
        aspect: what is done to an image of other proportions before: it is cropped ("crop") or filled up ("pad").
        fill: with what.
        antialias: whether all pixels count where the image becomes smaller.
    """

    def __init__(
        self, size: tuple[int, int], how: str, aspect: str = "", fill: float = 0.0, *, antialias: bool = False
    ) -> None:
        super().__init__()
        self.size, self.how, self.aspect, self.fill, self.antialias = size, how, aspect, fill, antialias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Interpolate between the centres of pixels; whole numbers are rounded."""
        given = x.dtype
        x = self._in_proportion(x)
        if self.how == "nearest":
            return F.interpolate(x, self.size, mode="nearest-exact")
        if given.is_floating_point:
            return F.interpolate(x, self.size, mode=self.how, align_corners=False, antialias=self.antialias)
        y = F.interpolate(x.float(), self.size, mode=self.how, align_corners=False, antialias=self.antialias).round()
        bounds = torch.iinfo(given)
        return y.clamp(bounds.min, bounds.max).to(given)

    def _in_proportion(self, x: torch.Tensor) -> torch.Tensor:
        """The middle of an image, or an image with a margin, as high to its width as the size that is asked for."""
        height, width = x.shape[2:]
        high, wide = int(width * self.size[0] / self.size[1]), int(height * self.size[1] / self.size[0])
        if self.aspect == "crop":
            high, wide = max(min(height, high), 1), max(min(width, wide), 1)
            top, left = (height - high) // 2, (width - wide) // 2
            return x[:, :, top : top + high, left : left + wide]
        if self.aspect == "pad":
            top, left = max(0, high - height) // 2, max(0, wide - width) // 2
            return F.pad(x, (left, left, top, top), value=self.fill)
        return x


class CenterCrop(nn.Module):
    """The middle of an image; one that is too small is cropped in proportion and enlarged."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size, self.enlarge = size, Resize(size, "bilinear", "crop")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Cut."""
        top, left = ((have - want) // 2 for have, want in zip(x.shape[2:], self.size, strict=True))
        if top < 0 or left < 0:
            enlarged: torch.Tensor = self.enlarge(x)
            return enlarged
        return x[:, :, top : top + self.size[0], left : left + self.size[1]]


def _images(layer: Any, site: Site) -> bool:
    """Whether the module takes channels first, for a layer over images."""
    if site.rank != 4:
        site.refuse(f"its input has {site.rank} dimensions", "give it batches of images")
    return bool(layer.data_format == "channels_last")


@converts("layers.Resizing")
def _resizing(layer: Any, site: Site) -> Part:
    if layer.interpolation not in ("nearest", "bilinear"):
        site.refuse(f"interpolation={layer.interpolation!r}", "nearest and bilinear are known; or " + _IN_DATA)
    if getattr(layer, "fill_mode", "constant") != "constant":
        site.refuse(f"fill_mode={layer.fill_mode!r}", _IN_DATA)
    aspect = "crop" if layer.crop_to_aspect_ratio else "pad" if getattr(layer, "pad_to_aspect_ratio", False) else ""
    fill = float(getattr(layer, "fill_value", 0.0))
    antialias = bool(layer.antialias) and layer.interpolation == "bilinear"
    module = Resize((layer.height, layer.width), layer.interpolation, aspect, fill, antialias=antialias)
    return Part(module, _images(layer, site))


@converts("layers.CenterCrop")
def _center_crop(layer: Any, site: Site) -> Part:
    return Part(CenterCrop((layer.height, layer.width)), _images(layer, site))


class Augmentation(nn.Module):
    """Nothing in evaluation; in training, what Keras draws is not here, and that is said."""

    def __init__(self, path: str, kind: str) -> None:
        super().__init__()
        self.path, self.kind = path, kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The image as it is."""
        if self.training:
            raise ModelError(
                f"{self.path} ({self.kind}) augments images in training, which is not carried over to torch; build the "
                "model without it and apply it in the data set: dataset.map(lambda x, y: (layer(x, training=True), y))"
            )
        return x


@converts(
    *(
        f"layers.{name}"
        for name in (
            "AugMix RandAugment RandomBrightness RandomColorDegeneration RandomColorJitter RandomContrast "
            "RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur RandomGrayscale RandomHue RandomInvert "
            "RandomPerspective RandomPosterization RandomRotation RandomSaturation RandomSharpness RandomShear "
            "RandomTranslation RandomZoom CutMix MixUp"
        ).split()
    )
)
def _augmentation(layer: Any, site: Site) -> Part:
    return Part(Augmentation(site.path, site.kind), site.keeps_layout())


@converts("layers.StringLookup", "layers.TextVectorization", "layers.Hashing", "layers.HashedCrossing")
def _strings(layer: Any, site: Site) -> NoReturn:
    site.refuse("it works on strings or their hashes", _IN_DATA + ", and let the model begin with its numbers")
