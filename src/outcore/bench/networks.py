"""Eight networks, one for each family of the TBD suite (Zhu et al., IISWC 2018), short enough to be read.

They have the layers and, at full size, the shapes of their originals: ResNet-50, a single-shot detector on it, a
Transformer for translation, Deep Speech 2, NCF, a convolutional actor-critic of Atari frames, DCGAN with Wasserstein's
loss, and BERT. Data are random numbers of the right shapes: a step takes as long, and nothing is downloaded.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "ActorCritic",
    "Adversaries",
    "DeepSpeech",
    "Detector",
    "LanguageModel",
    "Recommender",
    "ResNet",
    "Translator",
]


class Bottleneck(nn.Module):
    """Three convolutions around which the input is added."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != 4 * width:
            conv = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways."""
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-50 where depths are 3, 4, 6, 3."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        channels, stages = 64, []
        for number, depth in enumerate(depths):
            width, blocks = 64 << number, []
            for block in range(depth):
                blocks.append(Bottleneck(channels, width, 2 if block == 0 and number else 1))
                channels = 4 * width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.channels = channels
        self.head = nn.Linear(channels, classes)

    def maps(self, x: Tensor) -> list[Tensor]:
        """Feature maps of every stage."""
        x, found = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.head(self.maps(x)[-1].mean((2, 3)))
        return scores


class Detector(nn.Module):
    """Boxes and classes at every place of two feature maps, as a single-shot detector has them."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 81, anchors: int = 6) -> None:
        super().__init__()
        self.body = ResNet(depths)
        last = self.body.channels
        self.body.head = nn.Linear(1, 1)
        self.heads = nn.ModuleList(nn.Conv2d(c, anchors * (classes + 4), 3, padding=1) for c in (last // 2, last))
        self.outputs = classes + 4

    def forward(self, x: Tensor) -> Tensor:
        """Classes and boxes of all anchors: batch x anchors x (classes + 4)."""
        maps = self.body.maps(x)[-2:]
        found = [head(m).permute(0, 2, 3, 1) for head, m in zip(self.heads, maps, strict=True)]
        return torch.cat([f.reshape(f.shape[0], -1, self.outputs) for f in found], 1)


class Translator(nn.Module):
    """A Transformer with an encoder and a decoder."""

    def __init__(self, width: int = 512, layers: int = 6, words: int = 32000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.Transformer(width, max(2, width // 64), layers, layers, 4 * width, batch_first=True)
        self.out = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Scores of the next word at every place."""
        scores: Tensor = self.out(self.layers(self.words(source), self.words(target)))
        return scores


class DeepSpeech(nn.Module):
    """Convolutions over a spectrogram, recurrent layers, and a letter for every frame."""

    def __init__(self, width: int = 800, layers: int = 5, letters: int = 29) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
        )  # fmt: skip
        self.recurrent = nn.GRU(32 * 41, width, layers, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, letters)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of letters: batch x frames x letters."""
        maps = self.convs(x).flatten(1, 2).transpose(1, 2)
        letters: Tensor = self.out(self.recurrent(maps)[0])
        return letters


class Recommender(nn.Module):
    """Neural collaborative filtering: a product of vectors of a user and an item, and layers over both."""

    def __init__(self, users: int = 138_493, items: int = 26_744, width: int = 64) -> None:
        super().__init__()
        self.product = nn.ModuleList((nn.Embedding(users, width), nn.Embedding(items, width)))
        self.both = nn.ModuleList((nn.Embedding(users, 2 * width), nn.Embedding(items, 2 * width)))
        self.layers = nn.Sequential(
            nn.Linear(4 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 2 * width), nn.ReLU(),
            nn.Linear(2 * width, width), nn.ReLU(),
        )  # fmt: skip
        self.out = nn.Linear(2 * width, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        """How well each pair of user and item fits."""
        user, item = pairs.unbind(-1)
        product = self.product[0](user) * self.product[1](item)
        layers = self.layers(torch.cat((self.both[0](user), self.both[1](item)), -1))
        score: Tensor = self.out(torch.cat((product, layers), -1))
        return score.squeeze(-1)


class ActorCritic(nn.Module):
    """What to do, and what it is worth, from four frames of a game."""

    def __init__(self, actions: int = 18) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(),
            nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        )  # fmt: skip
        self.out = nn.Linear(512, actions + 1)

    def forward(self, frames: Tensor) -> Tensor:
        """Scores of the actions, and the value behind them."""
        found: Tensor = self.out(self.body(frames))
        return found


class Adversaries(nn.Module):
    """A generator and a critic of 64 px images; the critic sees real images and made ones."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = (100, 8 * width, 4 * width, 2 * width, width)
        made: list[nn.Module] = []
        for number, (a, b) in enumerate(itertools.pairwise(sizes)):
            made += [nn.ConvTranspose2d(a, b, 4, *((1, 0) if number == 0 else (2, 1)), bias=False)]
            made += [nn.BatchNorm2d(b), nn.ReLU()]
        self.generator = nn.Sequential(*made, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())
        seen: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for a, b in ((width, 2 * width), (2 * width, 4 * width), (4 * width, 8 * width)):
            seen += [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)]
        self.critic = nn.Sequential(*seen, nn.Conv2d(8 * width, 1, 4))

    def forward(self, noise: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """The critic's scores of made and of real images."""
        return self.critic(self.generator(noise)), self.critic(images)


class LanguageModel(nn.Module):
    """BERT's encoder, with a word at every place."""

    def __init__(self, width: int = 768, layers: int = 12, words: int = 30522, length: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(1, length, width))
        layer = nn.TransformerEncoderLayer(width, max(2, width // 64), 4 * width, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of words."""
        scores: Tensor = self.out(self.layers(self.words(x) + self.places))
        return scores
