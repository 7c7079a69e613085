"""The workloads of the HFTA paper, and two more: small networks that people train many of.

All sizes are arguments, so that tests take small ones and benchmarks the usual ones.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PointTransform(nn.Module):
    """The small network in PointNet that predicts a matrix to align the points with."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.size = size
        self.conv1, self.conv2 = nn.Conv1d(size, width, 1), nn.Conv1d(width, 2 * width, 1)
        self.conv3 = nn.Conv1d(2 * width, 16 * width, 1)
        self.fc1, self.fc2 = nn.Linear(16 * width, 8 * width), nn.Linear(8 * width, 4 * width)
        self.fc3 = nn.Linear(4 * width, size * size)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(width), nn.BatchNorm1d(2 * width), nn.BatchNorm1d(16 * width)
        self.bn4, self.bn5 = nn.BatchNorm1d(8 * width), nn.BatchNorm1d(4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = F.relu(self.bn3(self.conv3(x)))
        x = torch.max(x, 2)[0]
        x = F.relu(self.bn4(self.fc1(x)))
        x = F.relu(self.bn5(self.fc2(x)))
        x = self.fc3(x).view(-1, self.size, self.size)
        return x + torch.eye(self.size, dtype=x.dtype, device=x.device)


class PointFeatures(nn.Module):
    """Points to features, one vector per cloud, or per point beside the cloud's."""

    def __init__(self, width: int, per_point: bool) -> None:
        super().__init__()
        self.per_point = per_point
        self.stn, self.fstn = PointTransform(3, width), PointTransform(width, width)
        self.conv1, self.conv2 = nn.Conv1d(3, width, 1), nn.Conv1d(width, 2 * width, 1)
        self.conv3 = nn.Conv1d(2 * width, 16 * width, 1)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(width), nn.BatchNorm1d(2 * width), nn.BatchNorm1d(16 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.bmm(x.transpose(2, 1), self.stn(x)).transpose(2, 1)
        x = F.relu(self.bn1(self.conv1(x)))
        local = x = torch.bmm(x.transpose(2, 1), self.fstn(x)).transpose(2, 1)
        x = F.relu(self.bn2(self.conv2(x)))
        x = torch.max(self.bn3(self.conv3(x)), 2)[0]
        if not self.per_point:
            return x
        return torch.cat([x.unsqueeze(2).expand(-1, -1, local.shape[2]), local], 1)


class PointNet(nn.Module):
    """PointNet for classification of clouds ``[N, 3, points]``."""

    def __init__(self, classes: int = 16, width: int = 64, dropout: float = 0.3) -> None:
        super().__init__()
        self.features = PointFeatures(width, per_point=False)
        self.fc1, self.fc2 = nn.Linear(16 * width, 8 * width), nn.Linear(8 * width, 4 * width)
        self.fc3 = nn.Linear(4 * width, classes)
        self.dropout = nn.Dropout(dropout)
        self.bn1, self.bn2 = nn.BatchNorm1d(8 * width), nn.BatchNorm1d(4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.fc1(self.features(x))))
        x = F.relu(self.bn2(self.dropout(self.fc2(x))))
        return self.fc3(x)


class PointNetSegmentation(nn.Module):
    """PointNet for a class per point."""

    def __init__(self, classes: int = 8, width: int = 64) -> None:
        super().__init__()
        self.features = PointFeatures(width, per_point=True)
        sizes = [17 * width, 8 * width, 4 * width, 2 * width]
        pairs = list(pairwise(sizes))
        self.convs = nn.ModuleList(nn.Conv1d(a, b, 1) for a, b in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm1d(b) for _, b in pairs)
        self.last = nn.Conv1d(2 * width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.last(x)


class Gan(nn.Module):
    """DCGAN: generator and discriminator for 64 x 64 images."""

    def __init__(self, width: int = 64, noise: int = 100) -> None:
        super().__init__()
        sizes = [8 * width, 4 * width, 2 * width, width]
        up: list[nn.Module] = [nn.ConvTranspose2d(noise, sizes[0], 4, 1, 0, bias=False)]
        for a, b in pairwise(sizes):
            up += [nn.BatchNorm2d(a), nn.ReLU(True), nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False)]
        up += [nn.BatchNorm2d(width), nn.ReLU(True), nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh()]
        self.generator = nn.Sequential(*up)
        down: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
        for a, b in zip(sizes[:0:-1], sizes[-2::-1], strict=False):
            down += [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2, inplace=True)]
        self.discriminator = nn.Sequential(*down, nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False))


def discriminator_loss(gan: Gan, real: Tensor, noise: Tensor) -> Tensor:
    """Tell real images from generated ones."""
    fake = gan.generator(noise).detach()
    on_real, on_fake = gan.discriminator(real).flatten(), gan.discriminator(fake).flatten()
    return F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real)) + F.binary_cross_entropy_with_logits(
        on_fake, torch.zeros_like(on_fake)
    )


def generator_loss(gan: Gan, real: Tensor, noise: Tensor) -> Tensor:
    """Be taken for real."""
    judged = gan.discriminator(gan.generator(noise)).flatten()
    return F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))


class TransformerLM(nn.Module):
    """A language model: embedding, position, encoder layers with a causal mask, decoder."""

    def __init__(
        self,
        words: int = 10_000,
        size: int = 200,
        heads: int = 2,
        hidden: int = 200,
        layers: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, size)
        self.position = nn.Parameter(torch.randn(512, size) * 0.02)
        layer = nn.TransformerEncoderLayer(size, heads, hidden, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decode = nn.Linear(size, words)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.full((length, length), float("-inf"), device=tokens.device, dtype=self.position.dtype).triu(1)
        x = self.embed(tokens) * self.embed.embedding_dim**0.5 + self.position[:length]
        return self.decode(self.encoder(x, mask, is_causal=True)).transpose(1, 2)


class Bert(nn.Module):
    """BERT with a masked-language head tied to the embedding; by default the medium one."""

    def __init__(
        self,
        words: int = 30_522,
        size: int = 512,
        heads: int = 8,
        layers: int = 8,
        dropout: float = 0.1,
        longest: int = 512,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, size, padding_idx=0)
        self.positions, self.types = nn.Embedding(longest, size), nn.Embedding(2, size)
        self.norm, self.dropout = nn.LayerNorm(size, eps=1e-12), nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(size, heads, 4 * size, dropout, "gelu", 1e-12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head, self.head_norm = nn.Linear(size, size), nn.LayerNorm(size, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(words))

    def forward(self, tokens: Tensor) -> Tensor:
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(where) + self.types(torch.zeros_like(tokens))
        x = self.encoder(self.dropout(self.norm(x)), src_key_padding_mask=tokens == 0)
        x = self.head_norm(F.gelu(self.head(x)))
        return F.linear(x, self.words.weight, self.bias).transpose(1, 2)


class LstmTagger(nn.Module):
    """Embedding, two-layer bidirectional LSTM, a class per word."""

    def __init__(self, words: int = 1000, size: int = 64, hidden: int = 64, tags: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, size, padding_idx=0)
        self.lstm = nn.LSTM(size, hidden, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, tags)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(tokens))[0]).transpose(1, 2)
