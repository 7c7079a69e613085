"""Every layer that can be carried over, in the forms its settings give it, against plain Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import outcore.keras
from tests.keras.oracle import TOLERANCE, compare, keras

L = keras.layers

CASES: dict[str, Callable[[], list[Any]]] = {}


def case(name: str, *layers: Callable[[], Any]) -> None:
    assert name not in CASES
    CASES[name] = lambda: [layer() for layer in layers]


def image(*shape: int) -> Callable[[], Any]:
    return lambda: keras.Input(shape or (9, 8, 3))


for same in ("same", "valid"):
    for k in (1, 2, 3, 4, 5):
        for s in (1, 2, 3):
            case(f"conv-{same}-{k}-{s}", image(), lambda k=k, s=s, p=same: L.Conv2D(4, k, strides=s, padding=p))
            case(
                f"transpose-{same}-{k}-{s}",
                image(5, 4, 3),
                lambda k=k, s=s, p=same: L.Conv2DTranspose(4, k, strides=s, padding=p),
            )
            for kind in ("MaxPooling2D", "AveragePooling2D"):
                case(
                    f"{kind}-{same}-{k}-{s}",
                    image(),
                    lambda: L.Conv2D(2, 1),
                    lambda k=k, s=s, p=same, kind=kind: getattr(L, kind)(k, s, p),
                )
    case(f"conv-dilated-{same}", image(), lambda p=same: L.Conv2D(4, (3, 2), dilation_rate=2, padding=p))
    case(f"conv-groups-{same}", image(9, 8, 4), lambda p=same: L.Conv2D(6, 3, groups=2, padding=p, use_bias=False))
    case(f"depthwise-{same}", image(), lambda p=same: L.DepthwiseConv2D(3, 2, p, depth_multiplier=2))
    case(f"depthwise-1d-{same}", image(9, 3), lambda p=same: L.DepthwiseConv1D(3, 2, p, depth_multiplier=2))
    case(f"separable-{same}", image(), lambda p=same: L.SeparableConv2D(5, 3, 2, p, activation="relu"))
    case(f"separable-1d-{same}", image(9, 3), lambda p=same: L.SeparableConv1D(5, 3, 1, p))
    case(f"conv-1d-{same}", image(9, 3), lambda p=same: L.Conv1D(4, 4, strides=2, padding=p))
    case(f"conv-3d-{same}", image(6, 5, 4, 2), lambda p=same: L.Conv3D(3, 3, strides=2, padding=p))
    case(f"transpose-1d-{same}", image(6, 3), lambda p=same: L.Conv1DTranspose(4, 3, strides=2, padding=p))
    case(f"transpose-3d-{same}", image(3, 4, 2, 2), lambda p=same: L.Conv3DTranspose(3, 2, strides=2, padding=p))
    for kind in ("Max", "Average"):
        case(f"{kind}-1d-{same}", image(9, 3), lambda p=same, k=kind: getattr(L, f"{k}Pooling1D")(3, 2, p))
case("conv-1d-causal", image(9, 3), lambda: L.Conv1D(4, 3, padding="causal", dilation_rate=2))
for keep in (False, True):
    for kind in ("Max", "Average"):
        case(f"global-{kind}-{keep}", image(), lambda k=kind, d=keep: getattr(L, f"Global{k}Pooling2D")(keepdims=d))
        case(
            f"global-1d-{kind}-{keep}",
            image(7, 3),
            lambda k=kind, d=keep: getattr(L, f"Global{k}Pooling1D")(keepdims=d),
        )

for name in (
    "celu elu exponential gelu hard_shrink hard_sigmoid hard_silu hard_tanh leaky_relu linear log_sigmoid log_softmax "
    "mish relu relu6 selu sigmoid silu soft_shrink softmax softplus softsign sparse_plus squareplus tanh tanh_shrink"
).split():
    case(f"activation-{name}", image(), lambda: L.Conv2D(4, 1), lambda n=name: L.Activation(n))
    case(f"inner-{name}", image(), lambda n=name: L.Conv2D(4, 1, activation=n))
case("relu", image(), lambda: L.Conv2D(4, 1), lambda: L.ReLU(max_value=0.6, negative_slope=0.1, threshold=0.2))
case("relu-6", image(), lambda: L.Conv2D(4, 1), lambda: L.ReLU(6.0))
case("leaky-relu", image(), lambda: L.Conv2D(4, 1), lambda: L.LeakyReLU(0.3))
case("layer-as-activation", image(), lambda: L.Conv2D(4, 1, activation=L.LeakyReLU(0.3)))
case("elu", image(), lambda: L.Conv2D(4, 1), lambda: L.ELU(0.7))
case("prelu", image(), lambda: L.Conv2D(4, 1), lambda: L.PReLU(shared_axes=[1, 2]))
case("prelu-each", image(), lambda: L.Conv2D(4, 1), lambda: L.PReLU())
case("softmax-layer", image(), lambda: L.Conv2D(4, 1), lambda: L.Softmax())
case("softmax-axis", image(), lambda: L.Conv2D(4, 1), lambda: L.Softmax(axis=1))

for options in ({}, {"momentum": 0.7, "epsilon": 0.01}, {"scale": False}, {"center": False}, {"trainable": False}):
    shown = "-".join(options) or "plain"
    for dims in ((9, 8, 3), (7, 3), (4, 3, 2, 3), (5,)):
        case(
            f"batchnorm-{shown}-{len(dims)}",
            image(*dims),
            lambda o=options: L.BatchNormalization(**o),
            lambda: L.Dense(2),
        )
case("batchnorm-axis-1", image(), lambda: L.BatchNormalization(axis=1))
case("layernorm", image(), lambda: L.Conv2D(4, 1), lambda: L.LayerNormalization(epsilon=1e-4))
case("layernorm-axes", image(), lambda: L.LayerNormalization(axis=[1, 2, 3]))
case("layernorm-bare", image(6, 5), lambda: L.LayerNormalization(center=False, scale=False), lambda: L.Dense(3))
case("layernorm-scale", image(6, 5), lambda: L.LayerNormalization(center=False), lambda: L.Dense(3))
case("groupnorm", image(9, 8, 6), lambda: L.GroupNormalization(3))
case("groupnorm-instance", image(9, 8, 6), lambda: L.GroupNormalization(-1, center=False))
case("groupnorm-shift", image(9, 8, 6), lambda: L.Conv2D(6, 1), lambda: L.GroupNormalization(3, scale=False))
case("rmsnorm", image(7, 6), lambda: L.RMSNormalization())
case("unitnorm", image(7, 6), lambda: L.Dense(4), lambda: L.UnitNormalization())
case("rescaling", image(), lambda: L.Rescaling(1 / 127.5, -1), lambda: L.Conv2D(2, 3))
case("rescaling-channels", image(), lambda: L.Conv2D(3, 1), lambda: L.Rescaling([1.0, 2.0, 3.0], [0.1, 0.2, 0.3]))
case(
    "normalization",
    image(),
    lambda: L.Normalization(mean=[1.0, 2.0, 3.0], variance=[4.0, 5.0, 6.0]),
    lambda: L.Dense(2),
)

case("dense-flat", image(), lambda: L.Conv2D(4, 3), lambda: L.Flatten(), lambda: L.Dense(3, activation="softmax"))
case("dense-last-axis", image(), lambda: L.Conv2D(4, 3), lambda: L.Dense(3, use_bias=False))
case("einsum-dense", image(6, 5), lambda: L.EinsumDense("abc,cd->abd", (None, 7), bias_axes="d"))
case("reshape", image(), lambda: L.Conv2D(4, 1), lambda: L.Reshape((-1, 4)), lambda: L.Dense(2))
case("permute", image(), lambda: L.Conv2D(4, 1), lambda: L.Permute((3, 1, 2)), lambda: L.Dense(2))
case("repeat", image(5), lambda: L.Dense(4), lambda: L.RepeatVector(3), lambda: L.Dense(2))
case("zero-padding", image(), lambda: L.ZeroPadding2D(((1, 2), (0, 3))), lambda: L.Conv2D(4, 3))
case("zero-padding-1d", image(6, 3), lambda: L.ZeroPadding1D((1, 2)), lambda: L.Conv1D(4, 3))
case("zero-padding-3d", image(4, 3, 2, 3), lambda: L.ZeroPadding3D((1, 2, 0)), lambda: L.Conv3D(4, 2))
case("cropping", image(), lambda: L.Conv2D(4, 1), lambda: L.Cropping2D(((1, 2), (0, 3))))
case("cropping-1d", image(6, 3), lambda: L.Conv1D(4, 1), lambda: L.Cropping1D((1, 2)))
case("cropping-3d", image(4, 5, 6, 3), lambda: L.Conv3D(4, 1), lambda: L.Cropping3D((1, 0, 2)))
case("upsampling", image(), lambda: L.Conv2D(4, 1), lambda: L.UpSampling2D((2, 3)))
case("upsampling-bilinear", image(), lambda: L.Conv2D(4, 1), lambda: L.UpSampling2D(2, interpolation="bilinear"))
case("upsampling-1d", image(6, 3), lambda: L.Conv1D(4, 1), lambda: L.UpSampling1D(3))
case("upsampling-3d", image(4, 3, 2, 3), lambda: L.Conv3D(4, 1), lambda: L.UpSampling3D((2, 1, 2)))
case("resizing", image(), lambda: L.Conv2D(4, 1), lambda: L.Resizing(5, 11))
case("resizing-nearest", image(), lambda: L.Conv2D(4, 1), lambda: L.Resizing(5, 11, "nearest"))
case("dropout", image(), lambda: L.Conv2D(4, 1), lambda: L.Dropout(0.5), lambda: L.SpatialDropout2D(0.5))
case("dropout-shape", image(), lambda: L.Conv2D(4, 1), lambda: L.Dropout(0.5, noise_shape=(None, 1, 1, 1)))

for kind in ("LSTM", "GRU", "SimpleRNN"):
    for options in (
        {},
        {"return_sequences": True},
        {"use_bias": False},
        {"go_backwards": True, "return_sequences": True},
        {"activation": "relu"},
    ):
        shown = "-".join(options) or "plain"
        case(f"{kind}-{shown}", image(6, 3), lambda k=kind, o=options: getattr(L, k)(4, **o), lambda: L.Dense(2))
    for merge in ("concat", "sum", "ave", "mul"):
        case(
            f"bidirectional-{kind}-{merge}",
            image(6, 3),
            lambda k=kind, m=merge: L.Bidirectional(getattr(L, k)(4, return_sequences=True), merge_mode=m),
            lambda: L.Dense(2),
        )
case("gru-reset-before", image(6, 3), lambda: L.GRU(4, reset_after=False))
case("lstm-hard-sigmoid", image(6, 3), lambda: L.LSTM(4, recurrent_activation="hard_sigmoid", return_sequences=True))
case("time-distributed", image(3, 9, 8, 3), lambda: L.TimeDistributed(L.Conv2D(4, 3, 2, "same")))
case("time-distributed-dense", image(6, 5), lambda: L.TimeDistributed(L.Dense(4, activation="relu")))
case("embedding", lambda: keras.Input((6,), dtype="int32"), lambda: L.Embedding(11, 4), lambda: L.Dense(2))


ROUNDED = {
    "activation-gelu", "inner-gelu", "activation-leaky_relu", "inner-leaky_relu", "leaky-relu", "layer-as-activation",
    "relu", "upsampling-bilinear", "resizing",
}  # fmt: skip
"""On TensorFlow, Keras rounds the constants of these, or all of it, to float32 in a float64 model too."""


QUICK = set(
    "conv-same-3-2 conv-same-4-3 transpose-same-3-2 transpose-valid-2-3 MaxPooling2D-same-3-2 "
    "AveragePooling2D-same-4-3 depthwise-same separable-same conv-1d-causal conv-3d-same batchnorm-plain-3 "
    "batchnorm-trainable-3 layernorm groupnorm dense-flat LSTM-plain GRU-plain gru-reset-before embedding "
    "upsampling-bilinear inner-softmax zero-padding".split()
)
"""One or two of each family; the others are slow by their number."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_a_layer_is_carried_over(name: str) -> None:
    given, *layers = CASES[name]()
    value = given
    for layer in layers:
        value = layer(value)
    if not any(layer.weights for layer in layers):
        value = L.Dense(2)(value)
    compare(keras.Model(given, value), steps=2, within=1e-5 if name in ROUNDED else TOLERANCE)


def test_adapted_normalization_is_carried_over_with_its_statistics() -> None:
    layer = L.Normalization()
    layer.adapt(np.random.default_rng(0).normal(3.0, 2.0, (32, 4, 4, 3)))
    compare(keras.Sequential([keras.Input((4, 4, 3)), layer, L.Conv2D(2, 3)]), steps=1)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kind", ["Max", "Average"])
def test_pooling_of_volumes_in_float32(kind: str, padding: str) -> None:
    """TensorFlow has it in float32 alone."""
    keras.config.set_floatx("float32")
    given = keras.Input((5, 4, 7, 2))
    x = L.Conv3D(3, 1)(given)
    compare(keras.Model(given, getattr(L, f"{kind}Pooling3D")(3, 2, padding)(x)), steps=1, within=1e-5)


class _Convolutions(TorchDispatchMode):
    """Which convolutions run, and of which a gradient is taken: kernel, stride, channels."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.convolution_backward.default:
            self.seen.append((tuple(args[2].shape[2:]), tuple(args[4]), args[2].shape[1]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("padding", "side"), [("same", 8), ("valid", 7)])
def test_strided_kernels_of_one_pixel_over_few_channels_have_no_gaps(rank: int, padding: str, side: int) -> None:
    """With gaps and channels last, oneDNN's gradient in float32 writes past its memory: wrong numbers, or the end."""
    given = keras.Input((*[side] * rank, 5))
    layer = getattr(L, f"Conv{rank}D")(6, 1, strides=2, padding=padding)
    compare(keras.Model(given, layer(given)), size=side)
    twin = outcore.keras.to_torch(keras.Model(given, layer(given)), check=False)
    with _Convolutions() as convolutions:
        twin(torch.zeros(2, *[side] * rank, 5, dtype=torch.float64)).sum().backward()
    assert convolutions.seen and all(set(stride) == {1} for _, stride, _ in convolutions.seen)
