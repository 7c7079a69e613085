"""Figures of a validation, by name: accuracy, auc, dice, mae, rmse.

Each adds up what it needs batch by batch, on the host, and gives its value at the end; averages count examples (or
pixels), not batches, so the value does not depend on the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from outcore.errors import ConfigError, suggest

__all__ = ["HIGHER_IS_BETTER", "Metric", "classes_of", "default_metrics", "make_metrics"]


class Metric(Protocol):
    """A figure over all examples."""

    def add(self, output: Tensor, target: Tensor) -> None:
        """Take in a batch."""

    def value(self) -> float:
        """The figure over everything taken in; NaN where it is not defined."""


class Accuracy:
    """Share of examples (or pixels) whose largest output is the target.

    >>> metric = Accuracy()
    >>> metric.add(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    >>> metric.value()
    0.5
    """

    def __init__(self) -> None:
        self._right = self._all = 0

    def add(self, output: Tensor, target: Tensor) -> None:
        """Take in a batch."""
        found = classes_of(output)
        self._right += int((found == target.reshape(found.shape)).sum())
        self._all += target.numel()

    def value(self) -> float:
        """The share."""
        return self._right / self._all if self._all else float("nan")


class AreaUnderCurve:
    """Probability that an example of a class scores higher than another, ties counted half; the mean over classes.

    >>> metric = AreaUnderCurve()
    >>> metric.add(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    >>> metric.value()
    0.75
    """

    def __init__(self) -> None:
        self._scores: list[Tensor] = []
        self._targets: list[Tensor] = []

    def add(self, output: Tensor, target: Tensor) -> None:
        """Take in a batch."""
        if output.ndim > 1 and output.shape[1] == 1:
            output = output[:, 0]
        if output.ndim > 1:
            output = output.softmax(1)
        self._scores.append(output.detach().double().cpu())
        self._targets.append(target.detach().cpu().reshape(-1))

    def value(self) -> float:
        """The mean over the classes that occur; NaN if only one does."""
        if not self._scores:
            return float("nan")
        scores, targets = torch.cat(self._scores), torch.cat(self._targets)
        if scores.ndim == 1:
            return _area(scores, targets == 1)
        if scores.shape[1] == 2:
            return _area(scores[:, 1], targets == 1)
        areas = [_area(scores[:, c], targets == c) for c in range(scores.shape[1])]
        known = [area for area in areas if area == area]
        return sum(known) / len(known) if known else float("nan")


class Dice:
    """Twice the common area over the sum of areas; the mean over the classes that occur, class 0 left out.

    >>> metric = Dice()
    >>> metric.add(torch.tensor([[[0.0, 0.0], [9.0, 9.0]]]).unsqueeze(1) - 1, torch.tensor([[[0, 1], [1, 1]]]))
    >>> round(metric.value(), 3)
    0.8
    """

    def __init__(self) -> None:
        self._common: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def add(self, output: Tensor, target: Tensor) -> None:
        """Take in a batch."""
        found = classes_of(output)
        target = target.reshape(found.shape)
        for number in torch.unique(torch.cat([found.flatten(), target.flatten().to(found.dtype)])).tolist():
            here, there = found == number, target == number
            self._common[number] = self._common.get(number, 0) + int((here & there).sum())
            self._sizes[number] = self._sizes.get(number, 0) + int(here.sum()) + int(there.sum())

    def value(self) -> float:
        """The mean over classes."""
        each = [2 * self._common[number] / size for number, size in self._sizes.items() if number]
        return sum(each) / len(each) if each else float("nan")


class _Error:
    def __init__(self, power: int) -> None:
        self._power, self._sum, self._all = power, 0.0, 0

    def add(self, output: Tensor, target: Tensor) -> None:
        """Take in a batch."""
        off = (output.detach().double() - target.detach().double().reshape(output.shape)).abs()
        self._sum += float((off**self._power).sum())
        self._all += off.numel()

    def value(self) -> float:
        """The mean, and its root for squares."""
        return float((self._sum / self._all) ** (1 / self._power)) if self._all else float("nan")


_KNOWN: dict[str, Callable[[], Metric]] = {
    "accuracy": Accuracy,
    "auc": AreaUnderCurve,
    "dice": Dice,
    "mae": lambda: _Error(1),
    "rmse": lambda: _Error(2),
}
METRICS = tuple(_KNOWN)
"""Their names."""
HIGHER_IS_BETTER = frozenset(("accuracy", "auc", "dice"))


def make_metrics(names: Iterable[str]) -> dict[str, Metric]:
    """Fresh metrics by name."""
    made: dict[str, Metric] = {}
    for name in names:
        if name not in _KNOWN:
            raise ConfigError(f"no metric {name!r}; {suggest(name, _KNOWN)}")
        made[name] = _KNOWN[name]()
    return made


def default_metrics(target: Tensor) -> tuple[str, ...]:
    """What suits a batch of targets: classes of images, classes of pixels, or values."""
    if target.dtype.is_floating_point:
        return ("mae",)
    return ("dice", "accuracy") if target.ndim > 2 else ("accuracy", "auc")


def classes_of(output: Tensor) -> Tensor:
    """The class with the largest output; of one output, whether it is positive."""
    if output.ndim == 1 or output.shape[1] == 1:
        return (output.reshape(output.shape[0], *output.shape[2:]) > 0).long()
    return output.argmax(1)


def _area(scores: Tensor, positive: Tensor) -> float:
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros:
        return float("nan")
    _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts.double() - 1) / 2)[inverse]
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))
