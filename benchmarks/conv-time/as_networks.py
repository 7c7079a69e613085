"""Operations as networks have them, drawn at random: no network's own, but of the sizes they share.

The general sweep is log-uniform in everything, so that it has few of what networks have most of: large batches, images
that halve while channels double, first layers that see three channels, patches, batch norms whose weights stay float32,
and thousands of small matrix products. In turn: a first layer, an inner convolution, a batch norm, a first layer, a
batch norm, a product of attention.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from outcore.cost.predicted.operation import Operation
from outcore.machine.device import Device

LONGEST_S = 0.003
MOST_BYTES = 2 << 30
_SIDES = (7, 8, 12, 14, 17, 24, 27, 28, 35, 48, 56, 64, 73, 96, 112, 128)
_BATCHES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_WIDTHS = (
    *(16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 480, 512, 576, 640),
    *(768, 832, 960, 1024, 1152, 1280, 1536, 2048),
)


def as_networks_have(device: Device, *, dtype: str, seed: int = 3) -> Iterator[Operation]:
    """An endless list, forward and backward one after the other."""
    source = random.Random(f"{seed}/{dtype}/networks")
    for draw in itertools.cycle((_first, _inner, _norm, _first, _norm, _product)):
        drawn = draw(source, dtype)
        if (
            drawn.nbytes < MOST_BYTES
            and device.roofline_s(flops=drawn.flops, nbytes=drawn.nbytes, dtype=dtype) < LONGEST_S
        ):
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
        batch=source.choice(_BATCHES),
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


def _inner(source: random.Random, dtype: str) -> Operation:
    side = source.choice(_SIDES)
    kernel = source.choice(((1, 1),) * 5 + ((3, 3),) * 3 + ((5, 5), (1, 7), (7, 1), (1, 3), (3, 1)))
    widths = _widths(side)
    return Operation(
        "conv",
        batch=source.choice(_BATCHES),
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


def _norm(source: random.Random, dtype: str) -> Operation:
    side = source.choice(_SIDES)
    return Operation(
        "norm",
        batch=source.choice(_BATCHES),
        in_channels=source.choice(_widths(side)),
        size=(side, side),
        variant="batch",
        dtype=dtype,
    )


def _product(source: random.Random, dtype: str) -> Operation:
    """Scores of attention, or its values: positions by head size by positions, for every head of every window."""
    positions, head = source.choice((16, 36, 49, 49, 64, 100, 144, 197, 256)), source.choice((16, 24, 32, 32, 48, 64))
    inner, columns = (head, positions) if source.random() < 0.5 else (positions, head)
    return Operation(
        "matmul",
        batch=source.choice((64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)),
        in_channels=inner,
        out_channels=columns,
        size=(positions,),
        dtype=dtype,
    )


def _widths(side: int) -> list[int]:
    """Channels of images of a size."""
    return [n for n in _WIDTHS if n <= max(32, 16 * 2048 // side)]
