"""Networks of the field as a Keras user writes them, small; they run on every backend of Keras."""

from __future__ import annotations

from typing import Any


def lstm(keras: Any) -> Any:
    """Two recurrent layers, the first in both directions."""
    L = keras.layers
    given = keras.Input((9, 5))
    x = L.Bidirectional(L.LSTM(6, return_sequences=True))(given)
    return keras.Model(given, L.Dense(3)(L.LSTM(4)(x)))


def transformer(keras: Any) -> Any:
    """An encoder of two layers over tokens, with GELU."""
    L = keras.layers
    tokens = keras.Input((7,), dtype="int32")
    x = L.Embedding(13, 8)(tokens)
    x = x + L.Conv1D(8, 3, padding="same")(x)  # in the place of positions
    for _ in range(2):
        y = L.LayerNormalization()(x)
        x = x + L.MultiHeadAttention(2, 4)(y, y)
        x = x + L.Dense(8)(L.Dense(16, activation="gelu")(L.LayerNormalization()(x)))
    return keras.Model(tokens, L.Dense(3)(L.GlobalAveragePooling1D()(x)))


def _unet(
    keras: Any, rank: int, widths: tuple[int, ...], classes: int, kernel: Any = 3, transposed: bool = True
) -> Any:
    L = keras.layers
    conv, pool, up = (getattr(L, name.format(rank)) for name in ("Conv{}D", "MaxPooling{}D", "UpSampling{}D"))
    back = getattr(L, f"Conv{rank}DTranspose")

    def block(x: Any, width: int) -> Any:
        return L.ReLU()(L.BatchNormalization()(conv(width, kernel, padding="same")(x)))

    given = keras.Input((*(None,) * rank, 1))
    x, skips = given, []
    for width in widths[:-1]:
        x = block(x, width)
        skips.append(x)
        x = pool(2)(x)
    x = block(x, widths[-1])
    for width, skip in zip(widths[-2::-1], skips[::-1], strict=True):
        x = back(width, 2, strides=2)(x) if transposed else up(2)(x)
        x = block(L.Concatenate()([x, skip]), width)
    return keras.Model(given, conv(classes, 1, activation="softmax")(x))


def unet_2d(keras: Any) -> Any:
    return _unet(keras, 2, (4, 6, 8), 2)


def unet_3d(keras: Any) -> Any:
    return _unet(keras, 3, (3, 4, 5), 2)


def relaynet(keras: Any) -> Any:
    """Kernels of 7 x 3 over retinal layers; repeated pixels stand for unpooling, which Keras has not."""
    return _unet(keras, 2, (4, 4, 4, 4), 5, kernel=(7, 3), transposed=False)


def cosmoflow(keras: Any) -> Any:
    """Convolutions of volumes with leaky ReLUs and pools, then dense layers to four parameters."""
    L = keras.layers
    given = keras.Input((16, 16, 16, 2))
    x = given
    for width in (4, 6, 8):
        x = L.MaxPooling3D(2)(L.LeakyReLU(negative_slope=0.3)(L.Conv3D(width, 3, padding="same")(x)))
    x = L.Flatten()(x)
    for width in (16, 8):
        x = L.LeakyReLU(negative_slope=0.3)(L.Dense(width)(x))
    return keras.Model(given, L.Dense(4, activation="tanh")(x) * 1.2)


NETWORKS = {f.__name__: f for f in (lstm, transformer, unet_2d, unet_3d, relaynet, cosmoflow)}


def stack(keras: Any, normalized: bool = False) -> Any:
    """Eight convolutions of one width."""
    L = keras.layers
    given = keras.Input((None, None, 8))
    x = given
    for _ in range(8):
        x = L.Conv2D(8, 3, padding="same", activation=None if normalized else "relu")(x)
        x = L.ReLU()(L.BatchNormalization()(x)) if normalized else x
    return keras.Model(given, L.Dense(4)(L.GlobalAveragePooling2D()(x)))


def vision_transformer(keras: Any) -> Any:
    """Six layers of attention over patches."""
    L = keras.layers
    given = keras.Input((64, 64, 3))
    x = L.Reshape((256, 64))(L.Conv2D(64, 4, strides=4)(given))
    for _ in range(6):
        y = L.LayerNormalization()(x)
        x = x + L.MultiHeadAttention(4, 16)(y, y)
        x = x + L.Dense(64)(L.Dense(256, activation="gelu")(L.LayerNormalization()(x)))
    return keras.Model(given, L.Dense(10)(L.GlobalAveragePooling1D()(x)))


def _application(name: str) -> Any:
    return lambda keras: getattr(keras.applications, name)(weights=None, input_shape=(64, 64, 3), classes=10)


MEMORY: dict[str, tuple[Any, int, int]] = {
    "stack": (stack, 8, 64),
    "stack-bn": (lambda keras: stack(keras, True), 8, 64),
    "unet": (unet_2d, 8, 64),
    "unet-3d": (unet_3d, 4, 64),
    "relaynet": (relaynet, 8, 64),
    "cosmoflow": (cosmoflow, 8, 64),
    "lstm": (lstm, 8, 64),
    "transformer": (transformer, 64, 64),
    "vision-transformer": (vision_transformer, 4, 64),
    "ResNet50": (_application("ResNet50"), 8, 64),
    "MobileNetV2": (_application("MobileNetV2"), 8, 64),
    "DenseNet121": (_application("DenseNet121"), 8, 64),
    "VGG16": (_application("VGG16"), 8, 64),
}
"""Networks whose memory under ``fit`` is measured: how they are made, batch, and side of images."""

APPLICATIONS = {
    "VGG16": 32, "VGG19": 32, "ResNet50": 64, "ResNet101": 32, "ResNet152": 32, "ResNet50V2": 64, "ResNet101V2": 64,
    "ResNet152V2": 32, "InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71, "MobileNet": 64, "MobileNetV2": 64,
    "MobileNetV3Small": 64, "MobileNetV3Large": 64, "DenseNet121": 64, "DenseNet169": 64, "DenseNet201": 64,
    "EfficientNetB0": 64, "EfficientNetB1": 32, "EfficientNetB2": 32,
    "EfficientNetB3": 64, "EfficientNetV2B0": 32, "EfficientNetV2B1": 32, "EfficientNetV2B2": 32,
    "EfficientNetV2B3": 32, "EfficientNetB4": 32, "EfficientNetV2S": 32, "ConvNeXtTiny": 32, "ConvNeXtSmall": 32,
}  # fmt: skip
"""Models of keras.applications that run on torch too (NASNet does not), and the size of images."""
