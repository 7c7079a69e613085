"""A Keras U-Net that finds bright discs, as a job."""

import keras  # isort: skip
import torch

L = keras.layers
size = 4


def model(width: int = 16, side: int = 64) -> keras.Model:
    given = keras.Input((side, side, 1), name="image")
    skips, x = [], given
    for level in range(3):
        x = L.Conv2D(width << level, 3, padding="same", activation="relu")(x)
        x = L.BatchNormalization()(x)
        skips.append(x)
        x = L.MaxPooling2D()(x)
    for level in (2, 1, 0):
        x = L.Conv2DTranspose(width << level, 2, strides=2)(x)
        x = L.Concatenate()([x, skips[level]])
        x = L.Conv2D(width << level, 3, padding="same", activation="relu")(x)
    return keras.Model(given, L.Conv2D(1, 1, name="mask")(x), name="unet")


def batch(count: int, side: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    along = torch.arange(side)
    centre = torch.randint(side, (2, count, 1, 1))
    disc = (along[:, None] - centre[0]) ** 2 + (along - centre[1]) ** 2 < (side // 8) ** 2
    image = disc + 0.5 * torch.randn(count, side, side)
    return image[..., None], disc[..., None].float()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(output, target)


def optimizer(params: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)
