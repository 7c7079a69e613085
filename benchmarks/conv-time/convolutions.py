"""The convolutions this benchmark is about: those of the two source talks, and held-out random ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from outcore.cost.measured.op_sweep import sweep
from outcore.cost.predicted.operation import Operation
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


def family(device: Device, *, dtype: str, seed: int, kernels: tuple[int, ...] = (1, 3, 3, 5, 7)) -> Iterator[Operation]:
    """An endless list of random convolutions like the talks': dense, two-dimensional, kernels up to 7."""
    source = random.Random(f"{seed}/{dtype}")
    longest_s = 0.002 if device.kind == "cuda" else 0.02
    while True:
        kernel, first = source.choice(kernels), source.random() < 0.1
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
