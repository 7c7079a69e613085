"""AmoebaNet-D: every cell takes the outputs of the *two* cells before it.

Real et al., "Regularized Evolution for Image Classifier Architecture Search" (AAAI 2019, arXiv:1802.01548)
found the two cells; Huang et al., "GPipe" (NeurIPS 2019, arXiv:1811.06965) made the network a benchmark of
model parallelism, under the name AmoebaNet-D (number of normal cells, filters):

    stem ─ stem_reduction1 ─ stem_reduction2 ─ cells ─ reduction1 ─ cells ─ reduction2 ─ cells ─ classifier

An example of two-predecessor cells: wherever a pipeline is cut between cells, two values cross the cut, the
last cell's output, which the next two cells use, and the output of the cell before it.

The normal cell's output joins states 0, 3, 4 and 6, as in the authors' published code; the figure in the
paper joins 4, 5 and 6. The auxiliary head and the scheduled drop-path, which only regularise, are left out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outcore.errors import ModelError

Operation = Callable[[int, int], nn.Module]
"""From channels and stride to a module that keeps the channels."""


class Unit(nn.Sequential):
    """ReLU, convolution that gives ``ceil(size / stride)``, batch normalisation."""

    def __init__(self, channels: int, outputs: int, kernel: tuple[int, int], stride: tuple[int, int]) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2)
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(channels, outputs, kernel, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(outputs)


class FactorizedReduction(nn.Module):
    """Halve the image with two 1x1 convolutions, one of them on the pixels the other one skips."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(channels, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels, outputs - outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        # Drop the first row and column and add zeros at the far end: both halves keep ceil(size / 2) pixels.
        shifted = F.pad(x, (-1, 1, -1, 1))
        out: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return out


def keep(channels: int, stride: int) -> nn.Module:
    """The operation that does nothing; both cells use it on states of their own size only."""
    return nn.Identity()


def average_3x3(channels: int, stride: int) -> nn.Module:
    """Average of the true pixels: padding is not counted."""
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def maximum_3x3(channels: int, stride: int) -> nn.Module:
    """Maximum over 3x3 pixels."""
    return nn.MaxPool2d(3, stride, padding=1)


def maximum_2x2(channels: int, stride: int) -> nn.Module:
    """Maximum over 2x2 pixels; the last row and column of an odd image stand alone."""
    return nn.MaxPool2d(2, stride, ceil_mode=True)


def convolution_1x1(channels: int, stride: int) -> nn.Module:
    """One pointwise convolution."""
    return Unit(channels, channels, (1, 1), (stride, stride))


def convolution_3x3(channels: int, stride: int) -> nn.Module:
    """A 3x3 convolution through a bottleneck of a quarter of the channels."""
    narrow = channels // 4
    return nn.Sequential(
        Unit(channels, narrow, (1, 1), (1, 1)),
        Unit(narrow, narrow, (3, 3), (stride, stride)),
        Unit(narrow, channels, (1, 1), (1, 1)),
    )


def convolution_1x7_7x1(channels: int, stride: int) -> nn.Module:
    """A 7x7 convolution in two factors, through a bottleneck of a quarter of the channels."""
    narrow = channels // 4
    return nn.Sequential(
        Unit(channels, narrow, (1, 1), (1, 1)),
        Unit(narrow, narrow, (1, 7), (1, stride)),
        Unit(narrow, narrow, (7, 1), (stride, 1)),
        Unit(narrow, channels, (1, 1), (1, 1)),
    )


# States 0 and 1 are the last cell and the one before it; each row adds two operations up to the next state.
Rows = tuple[tuple[tuple[int, Operation], tuple[int, Operation]], ...]

NORMAL: Rows = (
    ((1, convolution_1x1), (1, maximum_3x3)),
    ((1, keep), (0, convolution_1x7_7x1)),
    ((0, convolution_1x1), (0, convolution_1x7_7x1)),
    ((2, maximum_3x3), (2, keep)),
    ((1, average_3x3), (5, convolution_1x1)),
)
NORMAL_JOINED = (0, 3, 4, 6)

REDUCTION: Rows = (
    ((0, maximum_2x2), (0, maximum_3x3)),
    ((2, keep), (1, convolution_3x3)),
    ((2, convolution_1x7_7x1), (2, maximum_3x3)),
    ((3, keep), (1, maximum_2x2)),
    ((2, average_3x3), (3, convolution_1x1)),
)
REDUCTION_JOINED = (4, 5, 6)


class Cell(nn.Module):
    """A normal or a reduction cell: bring both predecessors to one shape, add five pairs, join."""

    def __init__(
        self,
        last_channels: int,
        before_channels: int,
        channels: int,
        *,
        reduction: bool,
        before_is_larger: bool,
    ) -> None:
        super().__init__()
        self.rows = REDUCTION if reduction else NORMAL
        self.joined = REDUCTION_JOINED if reduction else NORMAL_JOINED
        self.channels_out = channels * len(self.joined)
        self.last: nn.Module = Unit(last_channels, channels, (1, 1), (1, 1))
        self.before: nn.Module
        if before_is_larger:
            self.before = FactorizedReduction(before_channels, channels)
        else:
            self.before = Unit(before_channels, channels, (1, 1), (1, 1))
        for number, row in enumerate(self.rows, start=1):
            for side, (state, operation) in zip(("left", "right"), row, strict=True):
                stride = 2 if reduction and state < 2 else 1
                self.add_module(f"{side}{number}", operation(channels, stride))

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        states: list[Tensor] = [self.last(last), self.before(before)]
        for number, ((left, _), (right, _)) in enumerate(self.rows, start=1):
            a = self.get_submodule(f"left{number}")(states[left])
            b = self.get_submodule(f"right{number}")(states[right])
            states.append(a + b)
        return torch.cat([states[i] for i in self.joined], dim=1)


class Classifier(nn.Sequential):
    """Global average, then one linear layer: any image size."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(channels, classes)


class AmoebaNetD(nn.Module):
    """AmoebaNet-D of GPipe, for images of any size; it halves them five times.

    >>> net = AmoebaNetD(classes=2, cells=6, filters=64)
    >>> net(torch.zeros(2, 3, 64, 64)).shape
    torch.Size([2, 2])

    Args:
        cells: number of normal cells, a multiple of 3; GPipe's L.
        filters: channels per state in the first third, doubled in each of the others; GPipe's D;
            a multiple of 8.
        channels: channels of the image.
    """

    def __init__(self, classes: int = 10, cells: int = 18, filters: int = 208, channels: int = 3) -> None:
        super().__init__()
        if cells < 3 or cells % 3:
            raise ModelError(f"cells={cells} is not a positive multiple of 3: try cells={max(3, cells // 3 * 3)}")
        if filters < 8 or filters % 8:
            raise ModelError(
                f"filters={filters} is not a positive multiple of 8: try filters={max(8, filters // 8 * 8)}"
            )
        width = filters // 4
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width))
        third = cells // 3
        names = ["stem_reduction1", "stem_reduction2"]
        names += [f"cell{i + 1}" for i in range(third)] + ["reduction1"]
        names += [f"cell{i + 1}" for i in range(third, 2 * third)] + ["reduction2"]
        names += [f"cell{i + 1}" for i in range(2 * third, cells)]
        self.order = tuple(names)
        last = before = width
        before_is_larger = False
        for name in self.order:
            reduction = "reduction" in name
            width *= 2 if reduction else 1
            cell = Cell(last, before, width, reduction=reduction, before_is_larger=before_is_larger)
            self.add_module(name, cell)
            last, before, before_is_larger = cell.channels_out, last, reduction
        self.classifier = Classifier(last, classes)

    def forward(self, image: Tensor) -> Tensor:
        last: Tensor = self.stem(image)
        before = last
        for name in self.order:
            last, before = self.get_submodule(name)(last, before), last
        scores: Tensor = self.classifier(last)
        return scores
