"""A sweep: which operations to measure so that others can be predicted.

Shapes are drawn at random, on logarithmic scales, from the ranges that networks use: a grid would spend its
points on combinations nobody builds, and a list of known networks would predict only those. The draw is
seeded and endless, and every draw is kept or dropped by the same rule (its roofline time and its memory are
within bounds), so a sweep that is stopped and taken up again, or given more time, measures the same list
further.

First come operations that are next to nothing, one or two of each kind: what they take is the start of an operation of
that kind. Without them the shortest of a few samples passed for it, and small networks were predicted several times too
slow. Then kinds are interleaved one by one: whenever time runs out, every kind has had its share.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outcore.cost.predicted.operation import VARIANTS, Kind, Operation
from outcore.machine.device import Device

SHARES: Mapping[Kind, int] = {
    "conv": 10,
    "conv_transpose": 2,
    "linear": 3,
    "matmul": 2,
    "attention": 2,
    "norm": 3,
    "pool": 2,
    "elementwise": 3,
    "softmax": 1,
    "embedding": 1,
    "copy": 1,
}
"""How many operations of each kind come in one round."""

_LAYER = {"batch": 1, "in_channels": 16}
_IMAGE = {**_LAYER, "size": (8, 8)}
_CONV = {**_IMAGE, "out_channels": 16, "kernel": (3, 3), "padding": (1, 1)}
_SMALLEST: Mapping[Kind, tuple[Mapping[str, Any], ...]] = {
    "conv": (_CONV, {**_CONV, "groups": 16}, {**_CONV, "in_channels": 3, "input_grad": False}),
    "conv_transpose": ({**_CONV, "kernel": (2, 2), "padding": (0, 0), "stride": (2, 2)},),
    "linear": (_LAYER,),
    "matmul": ({**_LAYER, "size": (8,)},),
    "attention": ({"in_channels": 32, "size": (16, 16)},),
    "norm": ({**_IMAGE, "variant": "batch"}, {**_LAYER, "variant": "layer"}),
    "pool": tuple({**_IMAGE, "kernel": (2, 2), "stride": (2, 2), "variant": v} for v in ("max", "avg")),
    "elementwise": tuple({**_IMAGE, "variant": v} for v in ("relu", "add", "mul")),
    "softmax": (_LAYER,),
    "embedding": ({"in_channels": 100, "out_channels": 16},),
    "copy": (_IMAGE,),
}
"""What of each kind is measured first."""

_SHORT_SHARE = 0.2
_CHANNELS = (
    8,
    16,
    24,
    32,
    40,
    48,
    64,
    80,
    96,
    128,
    160,
    192,
    256,
    320,
    384,
    512,
    640,
    768,
    1024,
    1280,
    1536,
    2048,
)
_SIDES = (7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 224, 256, 299, 512, 1024)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which draws are worth measuring on a device."""

    short_s: float
    """Below this roofline time of the forward operation all take the same: one in five is kept."""
    most_s: float
    """Above this roofline time none is kept."""
    most_bytes: int
    """Memory of the tensors of one forward and backward."""

    @classmethod
    def of(cls, device: Device) -> Bounds:
        """Bounds under which one measurement takes well under a second.

        On a CPU no tensor is so large that the system makes new pages for it with every call: estimates add those by
        themselves, and a sample would count them twice.
        """
        if device.kind == "cuda":
            return cls(2 * device.launch_s, 0.01, min(8 << 30, device.memory_bytes // 4))
        return cls(10 * device.dispatch_s, 0.004, min(64 << 20, device.memory_bytes // 8))


def sweep(
    device: Device,
    *,
    dtype: str,
    kinds: Sequence[Kind] | None = None,
    seed: int = 0,
    bounds: Bounds | None = None,
) -> Iterator[Operation]:
    """An endless list of operations, the smallest first and then those within bounds, each forward and then
    backward."""
    chosen = tuple(kinds) if kinds is not None else tuple(SHARES)
    limits = bounds if bounds is not None else Bounds.of(device)
    source = random.Random(f"{seed}/{dtype}/{','.join(chosen)}")
    for kind in chosen:
        for fields in _SMALLEST[kind]:
            yield from _both(Operation(kind, dtype=dtype, **fields))
    places = sorted(((i + 0.5) / SHARES[kind], kind) for kind in chosen for i in range(SHARES[kind]))
    while True:
        for _, kind in places:
            yield from _both(_draw_within(kind, dtype, device, limits, source))


def _both(operation: Operation) -> Iterator[Operation]:
    yield operation
    if operation.backward().nbytes:
        yield operation.backward()


def _draw_within(kind: Kind, dtype: str, device: Device, limits: Bounds, source: random.Random) -> Operation:
    while True:
        operation = draw(kind, dtype=dtype, source=source, image_formats=device.kind == "cuda")
        if 3 * operation.nbytes > limits.most_bytes:
            continue
        time_s = device.roofline_s(flops=operation.flops, nbytes=operation.nbytes, dtype=dtype)
        if time_s <= limits.most_s and (time_s > limits.short_s or source.random() < _SHORT_SHARE):
            return operation


def draw(kind: Kind, *, dtype: str, source: random.Random, image_formats: bool = True) -> Operation:
    """One random operation of a kind."""
    values: dict[str, Any] = {"dtype": dtype}
    if kind in ("conv", "conv_transpose", "pool"):
        values |= _image(kind, source)
    elif kind in ("norm", "elementwise", "copy"):
        values |= {"batch": _count(source, 1, 256), "in_channels": _channels(source), "size": _size(source)}
    elif kind in ("linear", "softmax"):
        values |= {"batch": _count(source, 1, 65536), "in_channels": _features(source)}
    elif kind == "matmul":
        values |= {
            "batch": _count(source, 1, 256),
            "size": (_count(source, 8, 4096),),
            "in_channels": _features(source),
        }
    elif kind == "attention":
        queries = _count(source, 16, 8192)
        keys = queries if source.random() < 0.8 else _count(source, 16, 8192)
        values |= {"batch": _count(source, 1, 64), "groups": _count(source, 1, 32), "size": (queries, keys)}
        values |= {"in_channels": source.choice((32, 64, 64, 80, 96, 128))}
    elif kind == "embedding":
        values |= {"batch": _count(source, 1, 65536), "in_channels": _count(source, 100, 100_000)}
        values |= {"out_channels": _channels(source)}
    if kind in ("linear", "matmul"):
        values["out_channels"] = _features(source)
    if kind in VARIANTS:
        values["variant"] = source.choice(VARIANTS[kind])
    if values.get("variant") in ("group", "instance"):
        values["in_channels"] = 32 * max(1, values["in_channels"] // 32)
        values["groups"] = 32 if values["variant"] == "group" else 1
    if image_formats and len(values.get("size", ())) in (2, 3) and kind != "attention":
        values["channels_last"] = source.random() < 0.5
    return Operation(kind, **values)


def _image(kind: Kind, source: random.Random) -> dict[str, Any]:
    size = _size(source)
    dims = len(size)
    if kind == "pool":
        side, stride = source.choice(((2, 2), (3, 2), (3, 1), (7, 7)))
        kernel, dilation = (side,) * dims, (1,) * dims
        stride = min(stride, *size)
    else:
        kernel = _kernel(source, dims)
        stride = source.choice((1, 1, 1, 2)) if kind == "conv" else 2
        dilation = (source.choice((1,) * 9 + (2,)),) * dims
    if kind == "conv_transpose":
        kernel = (source.choice((2, 3, 4)),) * dims
        dilation = (1,) * dims
    size = tuple(max(n, d * (k - 1) + 1) for n, k, d in zip(size, kernel, dilation, strict=True))
    padding = tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True))
    values: dict[str, Any] = {
        "batch": _count(source, 1, 256 if dims < 3 else 8),
        "size": size,
        "kernel": kernel,
        "stride": (stride,) * dims,
        "dilation": dilation,
        "padding": padding if kind != "pool" else tuple(min(p, k // 2) for p, k in zip(padding, kernel, strict=True)),
        "in_channels": _channels(source),
    }
    if kind != "pool":
        values |= _connection(source, values["in_channels"])
    return values


def _connection(source: random.Random, channels: int) -> dict[str, Any]:
    chance = source.random()
    if chance < 0.12:  # depth-wise
        return {"out_channels": channels, "groups": channels}
    if chance < 0.18 and channels % 32 == 0:
        return {"out_channels": 32 * max(1, _channels(source) // 32), "groups": 32}
    if chance < 0.26:  # a first layer
        return {
            "in_channels": source.choice((1, 3, 3, 4)),
            "out_channels": _channels(source),
            "input_grad": False,
        }
    if chance < 0.34:  # a last layer, which gives a few classes or colours
        return {"out_channels": source.choice((1, 2, 3, 4, 10))}
    return {"out_channels": _channels(source)}


def _kernel(source: random.Random, dims: int) -> tuple[int, ...]:
    side = source.choice((1, 1, 1, 3, 3, 3, 3, 5, 7)) if dims < 3 else source.choice((1, 3, 3, 3))
    if dims == 2 and source.random() < 0.06:
        return source.choice(((1, 7), (7, 1), (1, 3), (3, 1)))
    return (side,) * dims


def _size(source: random.Random) -> tuple[int, ...]:
    chance = source.random()
    if chance < 0.12:
        return (source.choice((8, 12, 16, 24, 32, 48, 64, 96, 128)),) * 3
    if chance < 0.15:
        return (_count(source, 32, 16384),)
    side = source.choice(_SIDES) if source.random() < 0.7 else _count(source, 7, 1024)
    return (side, side) if source.random() < 0.85 else (side, _count(source, 7, 1024))


def _channels(source: random.Random) -> int:
    return source.choice(_CHANNELS) if source.random() < 0.85 else _count(source, 4, 2048)


def _features(source: random.Random) -> int:
    return source.choice(_CHANNELS) * source.choice((1, 1, 2, 3)) if source.random() < 0.8 else _count(source, 8, 8192)


def _count(source: random.Random, low: int, high: int) -> int:
    """A whole number, uniform on a logarithmic scale; half of them powers of two."""
    value = float(low * (high / low) ** source.random())
    if source.random() < 0.5:
        return max(low, min(high, 1 << max(0, round(value).bit_length() - 1)))
    return round(value)
