"""The convolutions this benchmark is about: those of the two source talks, and held-out random ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from outcore.cost.opmodel import Operation
from outcore.cost.sweep import sweep
from outcore.machine.device import Device

TWELVE = (
    (3, 32, 3),
    (32, 32, 3),
    (32, 32, 5),
    (32, 32, 7),
    (32, 64, 3),
    (64, 64, 3),
    (64, 64, 5),
    (64, 64, 7),
    (64, 128, 3),
    (128, 128, 3),
    (128, 128, 5),
    (128, 128, 7),
)
"""In channels, out channels and kernel of each layer; images are 256 pixels wide and padding keeps that."""


def twelve(*, batch: int, dtype: str, side: int = 256, channels_last: bool = False) -> list[Operation]:
    """The twelve-convolution network, forward and backward; the first layer has no input gradient."""
    layers = [
        Operation(
            "conv",
            batch=batch,
            in_channels=wide,
            out_channels=out,
            size=(side, side),
            kernel=(kernel, kernel),
            padding=(kernel // 2, kernel // 2),
            dtype=dtype,
            channels_last=channels_last,
            input_grad=position > 0,
        )
        for position, (wide, out, kernel) in enumerate(TWELVE)
    ]
    return [direction for layer in layers for direction in (layer, layer.backward())]


_FAMILY_CHANNELS = (16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256)


def two(*, batch: int = 64, dtype: str = "fp32") -> list[Operation]:
    """The two layers whose times were printed: a digit classifier on 28-pixel images, batch 64."""
    first = Operation("conv", batch=batch, in_channels=1, out_channels=32, size=(28, 28), kernel=(3, 3), dtype=dtype)
    second = replace(first, in_channels=32, out_channels=64, size=(26, 26))
    return [
        replace(first, input_grad=False),
        replace(first, input_grad=False).backward(),
        second,
        second.backward(),
    ]


def family(device: Device, *, dtype: str, seed: int) -> Iterator[Operation]:
    """An endless list of random convolutions like the talks': dense, two-dimensional, kernels up to 7."""
    source = random.Random(f"{seed}/{dtype}")
    longest_s = 0.002 if device.kind == "cuda" else 0.02
    while True:
        kernel, first = source.choice((1, 3, 3, 5, 7)), source.random() < 0.1
        side = source.choice((26, 28, 32, 48, 56, 64, 96, 112, 128, 160, 192, 224, 256, 320, 384))
        drawn = Operation(
            "conv",
            batch=source.choice((1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)),
            in_channels=source.choice((1, 3)) if first else source.choice(_FAMILY_CHANNELS),
            out_channels=source.choice(_FAMILY_CHANNELS),
            size=(side, side),
            kernel=(kernel, kernel),
            padding=(kernel // 2, kernel // 2) if source.random() < 0.85 else (0, 0),
            dtype=dtype,
            channels_last=device.kind == "cuda" and source.random() < 0.5,
            input_grad=not first,
        )
        if device.roofline_s(flops=drawn.flops, nbytes=drawn.nbytes, dtype=dtype) < longest_s:
            yield drawn
            yield drawn.backward()


def held_out(device: Device, *, dtype: str, count: int) -> list[Operation]:
    """Random convolutions drawn with another seed than those a calibration is fitted to."""
    return list(itertools.islice(sweep(device, dtype=dtype, kinds=["conv"], seed=1), count))


def parts(device: Device, *, dtype: str, seed: int = 2) -> Iterator[Operation]:
    """An endless list of convolutions without bias, forward and each product of backward by itself: three like the
    talks', two of any kind, one depth-wise; and a layer norm."""
    like, anything = family(device, dtype=dtype, seed=seed), sweep(device, dtype=dtype, kinds=["conv"], seed=seed)
    norms, source = sweep(device, dtype=dtype, kinds=["norm"], seed=seed), random.Random(f"{seed}/{dtype}/parts")
    while True:
        drawn = [*itertools.islice(like, 0, 6, 2), *itertools.islice(anything, 0, 4, 2)]
        drawn.append(_depthwise(device, dtype, source))
        for forward in (replace(operation, bias=False) for operation in drawn):
            yield forward
            yield from forward.backward().parts()
        norm = next(o for o in norms if o.variant == "layer" and o.direction == "forward")
        yield from (norm, norm.backward())


_WIDTHS = (
    *(16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 480, 512, 576, 640),
    *(768, 832, 960, 1024, 1152, 1280, 1536, 2048),
)


def as_networks_have(device: Device, *, dtype: str, seed: int = 3) -> Iterator[Operation]:
    """An endless list of random convolutions as networks have them: large batches, images that halve while channels
    double, no bias, mostly channels first. Every second is a first layer, which sees three channels."""
    source = random.Random(f"{seed}/{dtype}/networks")
    longest_s = 0.003
    for place in itertools.count():
        drawn = _first(source, dtype) if place % 2 else _inner(source, dtype)
        if drawn is not None and device.roofline_s(flops=drawn.flops, nbytes=drawn.nbytes, dtype=dtype) < longest_s:
            yield drawn
            yield drawn.backward()


def _first(source: random.Random, dtype: str) -> Operation:
    """Three channels in, at full size: small kernels with a small stride, long ones with a longer, or patches."""
    side = source.choice((96, 128, 160, 192, 224, 224, 240, 256, 288, 299, 320, 384))
    kernel = source.choice((3, 3, 3, 4, 5, 7, 7, 8, 11, 11, 14, 16, 16, 32))
    patches = kernel in (4, 8, 14, 16, 32)
    stride = kernel if patches else 1 if kernel == 3 and source.random() < 0.4 else source.choice((2, 2, 4))
    wide = source.choice((192, 256, 384, 512, 768, 1024) if kernel > 11 else (16, 24, 32, 48, 64, 64, 80, 96, 128))
    padding = 0 if patches else source.choice((kernel // 2, kernel // 2, kernel // 2, 0, 2))
    return Operation(
        "conv",
        batch=source.choice((8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)),
        in_channels=3,
        out_channels=wide,
        size=(side, side),
        kernel=(kernel, kernel),
        stride=(stride, stride),
        padding=(padding, padding),
        dtype=dtype,
        bias=patches or source.random() < 0.4,
        input_grad=False,
    )


def _inner(source: random.Random, dtype: str) -> Operation | None:
    side = source.choice((7, 8, 12, 14, 17, 24, 27, 28, 35, 48, 56, 64, 73, 96, 112, 128))
    kernel = source.choice(((1, 1),) * 5 + ((3, 3),) * 3 + ((5, 5), (1, 7), (7, 1), (1, 3), (3, 1)))
    most = max(32, 16 * 2048 // side)
    widths = [n for n in _WIDTHS if n <= most]
    drawn = Operation(
        "conv",
        batch=source.choice((8, 16, 32, 48, 64, 96, 128, 192, 256, 384)),
        in_channels=source.choice(widths),
        out_channels=source.choice(widths),
        size=(side, side),
        kernel=kernel,
        stride=(source.choice((1, 1, 1, 1, 1, 2)),) * 2,
        padding=tuple(k // 2 for k in kernel),
        dtype=dtype,
        bias=source.random() < 0.15,
        channels_last=source.random() < 0.1,
    )
    return drawn if drawn.nbytes < 4 << 30 else None


def _depthwise(device: Device, dtype: str, source: random.Random) -> Operation:
    while True:
        side, kernel = source.choice((7, 14, 16, 28, 32, 56, 64, 112, 128)), source.choice((3, 3, 5, 5, 7, 7, 9))
        channels = source.choice(
            (16, 24, 32, 48, 64, 72, 96, 120, 128, 160, 192, 240, 256, 384, 480, 512, 672, 768, 960)
        )
        drawn = Operation(
            "conv",
            batch=source.choice((1, 2, 4, 8, 16, 32, 64, 128)),
            in_channels=channels,
            size=(side, side),
            kernel=(kernel, kernel),
            padding=(kernel // 2, kernel // 2),
            stride=(source.choice((1, 1, 2)),) * 2,
            groups=channels,
            dtype=dtype,
            channels_last=device.kind == "cuda" and source.random() < 0.5,
        )
        if drawn.nbytes < 1 << 30:
            return drawn
