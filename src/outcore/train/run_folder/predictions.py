"""The predictions for every example of a validation: a row each, as a table that other programs read.

    example,label,predicted,loss,p0,p1
    slides/validation-000.tif,1,1,0.2231,0.2,0.8

Kept for the best epoch, for outputs that are one row of scores for each example. Scores are softmax of the outputs (of
one output, its sigmoid), not calibrated. Of networks that give a class for every pixel there is a table beside it,
``maps.csv``, with how well each example's map agrees with its mask:

    example,dice,accuracy
    slides/validation-000.tif,0.8123,0.9541
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outcore.train.metrics import Accuracy, Dice
from outcore.train.run_folder.folder import replace

__all__ = ["Predictions"]

_MOST = 100_000
"""No table is written for more rows than this."""


class Predictions:
    """Rows of one validation."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self.fits = True
        """Whether the outputs are scores of classes."""
        self.maps: list[tuple[str, float, float]] = []
        """Of maps: example, Dice, accuracy."""

    def add(self, names: Sequence[str], output: Any, targets: Any) -> None:
        """Add the examples of a batch."""
        if _is_map(output, targets) and len(names) == len(output) and len(self.maps) + len(names) <= _MOST:
            for i, name in enumerate(names):
                dice, right = Dice(), Accuracy()
                for metric in (dice, right):
                    metric.add(output[i : i + 1].detach().float().cpu(), targets[i : i + 1].cpu())
                self.maps.append((name, dice.value(), right.value()))
        scores = _probabilities(output, targets)
        if scores is None or len(names) != len(scores) or len(self.rows) + len(names) > _MOST:
            self.fits = False
            return
        for name, row, label in zip(names, scores.tolist(), targets.reshape(-1).tolist(), strict=True):
            loss = (
                -torch.tensor(max(row[int(label)], 1e-12), device="cpu").log().item()
                if 0 <= int(label) < len(row)
                else ""
            )
            self.rows.append([name, int(label), row.index(max(row)), loss, *row])

    def write(self, path: Path) -> bool:
        """Write the table, and that of maps beside it; False if there is none of scores."""
        if self.maps:
            of_maps = io.StringIO()
            writer = csv.writer(of_maps, lineterminator="\n")
            writer.writerow(["example", "dice", "accuracy"])
            writer.writerows([name, f"{dice:.6g}", f"{right:.6g}"] for name, dice, right in self.maps)
            replace(path.with_name("maps.csv"), of_maps.getvalue())
        if not self.rows or not self.fits:
            return False
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["example", "label", "predicted", "loss", *(f"p{i}" for i in range(len(self.rows[0]) - 4))])
        writer.writerows([*row[:3], *(f"{v:.6g}" if isinstance(v, float) else v for v in row[3:])] for row in self.rows)
        replace(path, text.getvalue())
        return True


def _is_map(output: Any, targets: Any) -> bool:
    """Whether there is a class for every pixel, in the output and in the target."""
    both = isinstance(output, Tensor) and isinstance(targets, Tensor)
    return both and output.ndim >= 3 and targets.ndim >= 2 and not targets.is_floating_point()


def _probabilities(output: Any, targets: Any) -> Tensor | None:
    """Scores of every class, a row for each example; None where the output is something else."""
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    output = output.detach().float().cpu()
    if targets.numel() != len(output) or output.ndim > 2:
        return None
    if output.ndim == 1 or output.shape[1] == 1:
        one = output.reshape(-1).sigmoid()
        return torch.stack([1 - one, one], 1)
    scores: Tensor = output.softmax(1)
    return scores
