"""How each Keras layer is computed on a part of an image.

For a layer there are two questions: which intervals of its inputs do wanted intervals of its output depend on, and how
is the layer computed from just these, with padding only where the image ends. The answers are `needs` and `run` of a
`Rule`; the arithmetic of windows is that of `outcore.ops.region`, with Keras' own rule for ``padding="same"``. A region
is one interval for every dimension between batch and channels. Layers that are not here, and layers here in a mode in
which a pixel depends on all others (batch normalization in training, dropout), have no rule and end the streamed part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outcore.keras.tensorflow.calls import Call, run_call
from outcore.ops.region import Interval, Region, SlidingWindow, TransposedWindow, clip

__all__ = ["Rule", "Step", "rule_of"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One layer on one tile: what is cut from each crop, the padding around it, and what is kept of the result.

    It says nothing of where in the image the tile lies: tiles with equal steps are computed by one traced function.
    """

    cuts: tuple[tuple[Interval, ...], ...]
    pads: tuple[Interval, ...] = ()
    keep: tuple[Interval, ...] | None = None


@dataclass(frozen=True)
class Rule:
    """A layer region by region."""

    needs: Callable[[Region], tuple[Region, ...]]
    """From a wanted region to the regions of the inputs, in the order of the call's inputs."""
    around: Callable[[Region], tuple[tuple[Interval, ...], tuple[Interval, ...] | None]]
    """From a wanted region to the padding, and to what is kept of the result."""
    run: Callable[[Sequence[Any], Step], Any]
    """From crops that are cut already to the result, before `keep`."""


def same_low(size: int, kernel: int, stride: int, dilation: int) -> int:
    """What ``padding="same"`` puts before the first element."""
    out = -(-size // stride)
    return max((out - 1) * stride + (kernel - 1) * dilation + 1 - size, 0) // 2


def _windows(layer: Any, shape: Shape, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Any:
    windows = []
    for n, k, s, d in zip(shape, kernel, stride, dilation, strict=True):
        low = {"valid": 0, "same": same_low(n, k, s, d), "causal": (k - 1) * d}.get(layer.padding)
        if low is None:
            return None
        windows.append(SlidingWindow(n, k, s, d, low))
    return windows


def _sliding(windows: Sequence[SlidingWindow], run: Callable[[Sequence[Any], Step], Any]) -> Rule:
    def needs(out: Region) -> tuple[Region, ...]:
        return (tuple(clip(w.reach(i), w.size) for w, i in zip(windows, out, strict=True)),)

    def around(out: Region) -> tuple[tuple[Interval, ...], None]:
        pads = []
        for window, wanted in zip(windows, out, strict=True):
            a, b = window.reach(wanted)
            low, high = clip((a, b), window.size)
            pads.append((low - a, b - high))  # below zero where all that is wanted lies in the padding
        return tuple(pads), None

    return Rule(needs, around, run)


def _pointwise(run: Callable[[Sequence[Any], Step], Any], count: int) -> Rule:
    return Rule(lambda out: (out,) * count, lambda out: ((), None), run)


def padded(ops: Any, x: Any, pads: Sequence[Interval], value: float | None = None) -> Any:
    """A crop with padding around its pixels."""
    if not any(low or high for low, high in pads):
        return x
    x = ops.pad(x, [(0, 0), *((max(0, a), max(0, b)) for a, b in pads), (0, 0)], constant_values=value)
    kept = (slice(max(0, -a), n - max(0, -b)) for (a, b), n in zip(pads, x.shape[1:-1], strict=True))
    return x if all(a >= 0 and b >= 0 for a, b in pads) else x[(slice(None), *kept, slice(None))]


def _convolution(keras: Any, layer: Any, shape: Shape) -> Rule | None:
    ops, kind = keras.ops, type(layer).__name__
    windows = _windows(layer, shape, layer.kernel_size, layer.strides, layer.dilation_rate)
    if windows is None:
        return None

    def run(crops: Sequence[Any], step: Step) -> Any:
        x = padded(ops, crops[0], step.pads)
        how = {"strides": layer.strides, "padding": "valid", "dilation_rate": layer.dilation_rate}
        if kind.startswith("Separable"):
            x = ops.separable_conv(x, layer.depthwise_kernel, layer.pointwise_kernel, **how)
        elif kind.startswith("Depthwise"):
            x = ops.depthwise_conv(x, layer.kernel, **how)
        else:
            x = ops.conv(x, layer.kernel, **how)
        return _finished(ops, layer, x)

    return _sliding(windows, run)


def _finished(ops: Any, layer: Any, x: Any) -> Any:
    if layer.use_bias:
        x = ops.add(x, ops.reshape(layer.bias, (1,) * (len(x.shape) - 1) + (-1,)))
    return x if layer.activation is None else layer.activation(x)


def _transposed(keras: Any, layer: Any, shape: Shape) -> Rule | None:
    """A transposed convolution without dilation; its ``padding="same"`` makes stride times the input."""
    if any(d != 1 for d in layer.dilation_rate) or layer.output_padding is not None or layer.padding == "causal":
        return None
    windows = []
    for n, k, s in zip(shape, layer.kernel_size, layer.strides, strict=True):
        low = max(k - s, 0) // 2 if layer.padding == "same" else 0
        windows.append(TransposedWindow(n, k, s, 1, low))
    ops = keras.ops

    def needs(out: Region) -> tuple[Region, ...]:
        return (tuple(w.needs(i) for w, i in zip(windows, out, strict=True)),)

    def around(out: Region) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
        given = [w.needs(i) for w, i in zip(windows, out, strict=True)]
        starts = [w.start(i) for w, i in zip(windows, given, strict=True)]
        return (), tuple((a - start, b - start) for (a, b), start in zip(out, starts, strict=True))

    def run(crops: Sequence[Any], step: Step) -> Any:
        x = ops.conv_transpose(crops[0], layer.kernel, strides=layer.strides, padding="valid")
        return _finished(ops, layer, x)

    return Rule(needs, around, run)


def _pool(keras: Any, layer: Any, shape: Shape) -> Rule | None:
    ops, largest = keras.ops, type(layer).__name__.startswith("Max")
    windows = _windows(layer, shape, layer.pool_size, layer.strides, (1,) * len(shape))

    def run(crops: Sequence[Any], step: Step) -> Any:
        x = crops[0]
        if largest:
            return ops.max_pool(padded(ops, x, step.pads, x.dtype.min), layer.pool_size, layer.strides, "valid")
        mean = ops.average_pool(padded(ops, x, step.pads), layer.pool_size, layer.strides, "valid")
        if not any(low or high for low, high in step.pads):
            return mean
        inside = padded(ops, ops.ones_like(x[:1, ..., :1]), step.pads)  # Keras divides by what is inside
        return mean / ops.average_pool(inside, layer.pool_size, layer.strides, "valid")

    return None if windows is None else _sliding(windows, run)


def _upsampling(keras: Any, layer: Any, shape: Shape) -> Rule | None:
    """Repeated pixels; other interpolation is left to the untiled part."""
    if getattr(layer, "interpolation", "nearest") != "nearest":
        return None
    factors = layer.size if isinstance(layer.size, (tuple, list)) else (layer.size,)

    def needs(out: Region) -> tuple[Region, ...]:
        return (tuple((a // f, (b - 1) // f + 1) for (a, b), f in zip(out, factors, strict=True)),)

    def around(out: Region) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
        return (), tuple((a - a // f * f, b - a // f * f) for (a, b), f in zip(out, factors, strict=True))

    def run(crops: Sequence[Any], step: Step) -> Any:
        x = crops[0]
        for dim, factor in enumerate(factors, 1):
            x = keras.ops.repeat(x, factor, axis=dim)
        return x

    return Rule(needs, around, run)


def _padding(keras: Any, layer: Any, shape: Shape) -> Rule:
    sides = layer.padding if isinstance(layer.padding[0], (tuple, list)) else (layer.padding,)
    windows = [SlidingWindow(n, 1, 1, 1, low) for n, (low, _) in zip(shape, sides, strict=True)]
    return _sliding(windows, lambda crops, step: padded(keras.ops, crops[0], step.pads))


def _cropping(keras: Any, layer: Any, shape: Shape) -> Rule:
    sides = layer.cropping if isinstance(layer.cropping[0], (tuple, list)) else (layer.cropping,)
    windows = [SlidingWindow(n, 1, 1, 1, -low) for n, (low, _) in zip(shape, sides, strict=True)]
    return _sliding(windows, lambda crops, step: crops[0])


_CONVOLUTIONS = {f"{kind}Conv{n}D" for kind in ("", "Depthwise", "Separable") for n in (1, 2, 3)}
_POINTWISE = {
    "Activation", "ReLU", "LeakyReLU", "ELU", "Identity", "Rescaling", "Add", "Subtract", "Multiply", "Average",
    "Maximum", "Minimum",
}  # fmt: skip
_ELEMENTWISE = {
    "Add", "Subtract", "Multiply", "Divide", "TrueDivide", "Maximum", "Minimum", "Negative", "Absolute", "Square",
    "Sqrt", "Exp", "Log", "Tanh", "Sigmoid", "Relu", "Relu6", "Silu", "Gelu", "Softplus", "Elu", "Selu", "LeakyRelu",
    "HardSigmoid", "HardSilu",
}  # fmt: skip


def rule_of(keras: Any, call: Call, shapes: Sequence[Shape | None], training: bool) -> Rule | None:
    """The rule of a call on inputs of whole shapes (between batch and channels), or none."""
    layer, kind = call.operation, type(call.operation).__name__
    if any(shape is None for shape in shapes) or not shapes or len({len(s) for s in shapes if s is not None}) != 1:
        return None
    whole = [shape for shape in shapes if shape is not None]
    module = type(layer).__module__
    if getattr(layer, "data_format", "channels_last") != "channels_last":
        return None
    alike = len(set(whole)) == 1
    if module.startswith("keras.src.ops."):
        return _pointwise(_called(call, training), len(whole)) if kind in _ELEMENTWISE and alike else None
    if not module.startswith("keras.src.layers."):
        return None
    if kind in _CONVOLUTIONS:
        return _convolution(keras, layer, whole[0])
    if kind.startswith("Conv") and kind.endswith("Transpose"):
        return _transposed(keras, layer, whole[0])
    if kind.startswith(("MaxPooling", "AveragePooling")):
        return _pool(keras, layer, whole[0])
    if kind.startswith("UpSampling"):
        return _upsampling(keras, layer, whole[0])
    if kind.startswith("ZeroPadding"):
        return _padding(keras, layer, whole[0])
    if kind.startswith("Cropping"):
        return _cropping(keras, layer, whole[0])
    if _by_pixel(layer, kind, len(whole[0]) + 2, training) and alike:
        return _pointwise(_called(call, training), len(whole))
    return None


def _by_pixel(layer: Any, kind: str, rank: int, training: bool) -> bool:
    """Whether a layer computes every pixel from the same pixel of its inputs."""
    axis = getattr(layer, "axis", None)
    last = axis in (-1, rank - 1, [-1], [rank - 1], (-1,), (rank - 1,))
    if kind == "BatchNormalization":
        return last and not (training and layer.trainable)
    if kind in ("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "GaussianNoise"):
        return not training or not getattr(layer, "rate", getattr(layer, "stddev", 1))
    if kind in ("Softmax", "Concatenate", "LayerNormalization"):
        return last
    if kind == "Dense":
        return True
    if kind == "Activation":
        return getattr(layer.activation, "__name__", "") not in ("softmax", "log_softmax") or rank > 2
    return kind in _POINTWISE


def _called(call: Call, training: bool) -> Callable[[Sequence[Any], Step], Any]:
    """The layer itself, called with crops in the place of its inputs."""

    def run(crops: Sequence[Any], step: Step) -> Any:
        values = dict(zip(call.inputs, crops, strict=True))
        run_call(call, values, training)
        return values[call.outputs[0]]

    return run
