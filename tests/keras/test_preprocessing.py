"""Preprocessing layers inside a model: those that are arithmetic on tensors are carried over, others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import outcore.keras
from outcore.errors import ModelError
from tests.keras.oracle import compare, keras, tf

L = keras.layers

IMAGES: dict[str, Callable[[], Any]] = {
    "crop": lambda: L.CenterCrop(6, 5),
    "crop-odd": lambda: L.CenterCrop(5, 6),
    "crop-enlarged": lambda: L.CenterCrop(12, 5),
    "resize": lambda: L.Resizing(5, 11),
    "resize-nearest": lambda: L.Resizing(5, 11, "nearest"),
    "resize-crop": lambda: L.Resizing(7, 4, crop_to_aspect_ratio=True),
    "resize-pad": lambda: L.Resizing(7, 4, pad_to_aspect_ratio=True, fill_value=0.5),
    "resize-pad-wide": lambda: L.Resizing(4, 9, pad_to_aspect_ratio=True),
    "resize-antialias": lambda: L.Resizing(4, 5, antialias=True),
    "rescale": lambda: L.Rescaling(0.5, 0.25),
    "normalize": lambda: L.Normalization(mean=[1.0, 2.0, 3.0], variance=[4.0, 5.0, 6.0]),
    "normalize-back": lambda: L.Normalization(mean=0.5, variance=4.0, invert=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_preprocessing_of_images_is_carried_over(name: str) -> None:
    given = keras.Input((9, 10, 3))
    x = L.Conv2D(3, 1)(given) if name != "resize-antialias" else given  # no gradient in float64 on TensorFlow
    compare(keras.Model(given, L.Conv2D(2, 3)(IMAGES[name]()(x))), steps=1, within=1e-5)  # TensorFlow: in float32


def tables() -> Any:
    """Categories, bins and a vocabulary, in all their modes, in one model."""
    numbers, more, values = keras.Input((4,), dtype="int32"), keras.Input((1,), dtype="int32"), keras.Input((3,))
    adapted = L.Discretization(num_bins=4, output_mode="one_hot")
    adapted.adapt(np.random.default_rng(0).standard_normal((64, 1)))
    weights = keras.ops.concatenate([values, values[:, :1]], axis=1)
    made = [
        *(L.CategoryEncoding(5, output_mode=how)(numbers) for how in ("multi_hot", "count")),
        L.CategoryEncoding(5, output_mode="count")(numbers, count_weights=weights),
        L.CategoryEncoding(5, output_mode="one_hot")(more),
        L.Flatten()(L.CategoryEncoding(5, output_mode="one_hot")(numbers)),
        *(L.Discretization([-1.0, 0.0, 0.5], output_mode=how)(values) for how in ("multi_hot", "count")),
        L.Flatten()(L.Discretization([-1.0, 0.0, 0.5], output_mode="one_hot")(values)),
        L.Flatten()(adapted(values)),
        L.Flatten()(L.Embedding(4, 2)(L.Discretization([-1.0, 0.0, 0.5])(values))),
        L.Flatten()(L.Embedding(6, 2)(L.IntegerLookup(vocabulary=[3, 1, 0])(numbers))),
        L.IntegerLookup(vocabulary=[3, 1, 0], output_mode="multi_hot")(numbers),
    ]
    floats = [keras.ops.cast(x, "float64") for x in made]
    return keras.Model([numbers, more, values], L.Dense(3)(L.Concatenate()(floats)))


def test_categories_bins_and_vocabularies_are_carried_over() -> None:
    model = tables()
    compare(model, steps=1)
    twin = outcore.keras.to_torch(model)
    far = [np.array([[0, 1, 2, 4]], "int32"), np.array([[4]], "int32"), np.array([[-1.0, 0.5, 7.0]])]  # on the bounds
    found = twin.eval()(*(torch.from_numpy(x) for x in far)).detach().numpy()
    assert np.abs(np.asarray(model(far, training=False)) - found).max() < 1e-10


def test_whole_numbers_are_rounded_when_an_image_is_resized() -> None:
    given = keras.Input((8, 12, 3), dtype="uint8")
    model = keras.Model(given, [L.Resizing(4, 6)(given), L.Resizing(5, 7, "nearest")(given)])
    x = np.random.default_rng(0).integers(0, 256, (2, 8, 12, 3)).astype("uint8")
    twin = outcore.keras.to_torch(model)
    for want, have in zip(model(x, training=False), twin(torch.from_numpy(x)), strict=True):
        assert have.dtype == torch.uint8 and np.abs(np.asarray(want, "int64") - have.numpy().astype("int64")).max() == 0


AUGMENTS: dict[str, Callable[[], Any]] = {
    "RandomFlip": lambda: L.RandomFlip(),
    "RandomRotation": lambda: L.RandomRotation(0.2),
    "RandomZoom": lambda: L.RandomZoom(0.2),
    "RandomTranslation": lambda: L.RandomTranslation(0.1, 0.1),
    "RandomBrightness": lambda: L.RandomBrightness(0.2, value_range=(0, 1)),
    "RandomContrast": lambda: L.RandomContrast(0.2),
    "RandomShear": lambda: L.RandomShear(0.1, 0.1),
    "RandomHue": lambda: L.RandomHue(0.2, value_range=(0, 1)),
    "RandomSaturation": lambda: L.RandomSaturation(0.2, value_range=(0, 1)),
    "RandomErasing": lambda: L.RandomErasing(value_range=(0, 1)),
    "RandomGaussianBlur": lambda: L.RandomGaussianBlur(0.5, value_range=(0, 1)),
    "RandomPerspective": lambda: L.RandomPerspective(0.5),
    "RandAugment": lambda: L.RandAugment(value_range=(0, 1)),
}


@pytest.mark.parametrize(
    "name", [n if n == "RandomFlip" else pytest.param(n, marks=pytest.mark.slow) for n in AUGMENTS]
)
def test_augmentation_does_nothing_in_evaluation_and_is_named_in_training(name: str) -> None:
    keras.config.set_floatx("float32")
    inner = keras.Sequential([keras.Input((8, 8, 3)), AUGMENTS[name]()], name="augment")
    model = keras.Sequential([keras.Input((8, 8, 3)), inner, L.Conv2D(2, 3)], name="model")
    twin = outcore.keras.to_torch(model)  # compares outputs in evaluation
    with pytest.raises(ModelError, match=rf"model/augment/\w+ \({name}\) augments images in training.*data set"):
        twin.train()(torch.zeros(2, 8, 8, 3))


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "words": (lambda: L.StringLookup(vocabulary=["a", "b"]), "string", "works on strings.*data set"),
    "text": (lambda: L.TextVectorization(vocabulary=["a"], output_sequence_length=3), "string", "works on strings"),
    "hash": (lambda: L.Hashing(5), "int32", "works on strings or their hashes"),
    "bicubic": (lambda: L.Resizing(4, 4, "bicubic"), "image", "interpolation='bicubic'"),
    "random-crop": (lambda: L.RandomCrop(4, 4), "image", "data set"),
    "no-bins": (lambda: L.Discretization(num_bins=3), "float64", "adapt"),
    "many-unknown": (lambda: L.IntegerLookup(vocabulary=[1, 2], num_oov_indices=3), "int32", "num_oov_indices=3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_preprocessing_that_is_no_arithmetic_on_tensors_is_refused_by_its_path(name: str) -> None:
    make, kind, message = REFUSED[name]
    given = keras.Input((8, 8, 3)) if kind == "image" else keras.Input((1,), dtype=kind)
    layer = make()
    with pytest.raises(ModelError, match=f"model/{layer.name} .*{message}"):
        outcore.keras.to_torch(keras.Model(given, layer(given), name="model"))


def test_a_model_with_rescaling_and_normalization_adapted_is_carried_over() -> None:
    layer = L.Normalization()
    layer.adapt(np.random.default_rng(0).normal(3.0, 2.0, (32, 3)))
    data = tf.constant(np.random.default_rng(1).standard_normal((2, 3)))
    model = keras.Sequential([keras.Input((3,)), layer, L.Rescaling(0.5), L.Dense(2)])
    twin = outcore.keras.to_torch(model)
    assert np.abs(model(data).numpy() - twin.eval()(torch.from_numpy(data.numpy())).detach().numpy()).max() < 1e-10
