"""The models of keras.applications, without their weights."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch

from outcore.keras import to_torch
from outcore.keras.check import example_inputs
from tests.keras.oracle import compare, error, keras, scrambled, without_dropout

SIZES = {
    "VGG16": 32, "VGG19": 32, "ResNet50": 32, "ResNet101": 32, "ResNet152": 32, "ResNet50V2": 32, "ResNet101V2": 32,
    "ResNet152V2": 32, "InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71, "MobileNet": 33, "MobileNetV2": 33,
    "MobileNetV3Small": 33, "MobileNetV3Large": 33, "DenseNet121": 33, "DenseNet169": 32, "DenseNet201": 32,
    "NASNetMobile": 33, "NASNetLarge": 33, "EfficientNetB0": 33, "EfficientNetB1": 32, "EfficientNetB2": 32,
    "EfficientNetB3": 32, "EfficientNetV2B0": 33, "EfficientNetV2B1": 32, "EfficientNetV2S": 32, "ConvNeXtTiny": 32,
    "ConvNeXtSmall": 32,
}  # fmt: skip


ROUNDED = {"ConvNeXtTiny", "ConvNeXtSmall"}
"""On TensorFlow, Keras rounds the constant of GELU to float32."""


def sensitivity(model: object) -> float:
    """What one unit in the last place of the input changes in the output of the twin, in training.

    Where few values are normalized it is large: 3e-8 for EfficientNetV2S at 32 pixels.
    """
    twin = to_torch(scrambled(without_dropout(model)), check=False).train()
    x = torch.from_numpy(example_inputs(model, batch=3)[0])
    with torch.no_grad():
        return error(twin(x), twin(x * (1 + 2.3e-16 * torch.randn_like(x).sign())))


def build(name: str) -> object:
    size = SIZES[name]
    make = getattr(keras.applications, name)
    if "include_preprocessing" in inspect.signature(make).parameters:
        make = functools.partial(make, include_preprocessing=False)
    return make(weights=None, input_shape=(size, size, 3), include_top=False, pooling="avg")


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_an_application_is_carried_over(name: str) -> None:
    allowed = 1e-5 if name in ROUNDED else max(1e-8, 50 * sensitivity(build(name)))
    assert allowed < 1e-4
    compare(build(name), steps=1, batch=3, within=allowed)
