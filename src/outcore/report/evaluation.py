"""How well a run's network does, from its table of predictions: per class, per slide, with intervals.

Everything is computed from ``predictions.csv`` alone, so it can be computed again by anybody. Intervals are of 95 %, by
drawing the examples again with replacement (Efron 1979), 1,000 times, with a fixed seed, and by a score interval
(`outcore.report.intervals`), of which the wider end counts: they say how much the figures would change with other
slides of the same kind, and are wide for few slides, also where all of those are right. Of two classes the second is
the positive one; of more, each is taken against all others.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outcore.documents.reading import read_text
from outcore.errors import OutcoreError
from outcore.report.intervals import area_interval, wilson

__all__ = ["Evaluation", "EvaluationCurve", "evaluate"]

_DRAWS = 1000
_GRID = np.linspace(0.0, 1.0, 101)
Array = Any


@dataclass(frozen=True)
class EvaluationCurve:
    """A curve over a grid of x, its area, and the intervals of both."""

    name: str
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    area: float
    area_low: float
    area_high: float

    @property
    def interval(self) -> list[float | None]:
        """The area and the ends of its interval; None where a class is missing."""
        return [None if np.isnan(v) else v for v in (self.area, self.area_low, self.area_high)]


@dataclass(frozen=True)
class Evaluation:
    """The figures of one validation."""

    classes: tuple[str, ...]
    counts: tuple[int, ...]
    """Examples of each class."""
    confusion: tuple[tuple[int, ...], ...]
    """Rows are true classes, columns predicted ones."""
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    roc: tuple[EvaluationCurve, ...]
    precision_recall: tuple[EvaluationCurve, ...]
    examples: tuple[dict[str, Any], ...]
    """All examples, those with the largest loss first."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the curves."""
        areas = [
            {"class": r.name, "roc": r.interval, "pr": p.interval}
            for r, p in zip(self.roc, self.precision_recall, strict=True)
        ]
        return {
            "classes": list(self.classes),
            "counts": list(self.counts),
            "confusion": [list(row) for row in self.confusion],
            "accuracy": [self.accuracy, self.accuracy_low, self.accuracy_high],
            "areas": areas,
            "examples": list(self.examples),
        }


def _probabilities(columns: Iterable[str]) -> list[str]:
    """The columns ``p0``, ``p1``, …"""
    return [name for name in columns if name[:1] == "p" and name[1:].isdecimal()]


def _rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table of predictions, each with a label, a prediction and a probability of every class.

    Raises:
        OutcoreError: it is something else; names the line.
    """
    text = read_text(path, OutcoreError, "predictions")
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise OutcoreError(f"{path} is no table of predictions: {error}") from None
    columns = list(reader.fieldnames or ())
    names = _probabilities(columns)
    if rows and (not names or not {"label", "predicted", "example"} <= set(columns)):
        raise OutcoreError(f"{path} has columns {', '.join(columns)}; expected example, label, predicted, p0, p1, …")
    for number, row in rows:
        try:
            known = all(0 <= int(row[name]) < len(names) for name in ("label", "predicted"))
            finite = all(math.isfinite(float(row[name])) for name in names) and _loss(row) is not None
        except (TypeError, ValueError):
            known = finite = False
        if not known or not finite or None in row:
            raise OutcoreError(
                f"{path}, line {number}: expected classes of 0 to {len(names) - 1} and their probabilities"
            )
    return [row for _, row in rows]


def evaluate(path: Path, classes: Sequence[str] = ()) -> Evaluation | None:
    """The figures of a table of predictions; None if it holds none.

    Args:
        path: ``predictions.csv`` of a run.
        classes: their names; numbers if not given.
    """
    rows = _rows(path)
    if not rows:
        return None
    scores = np.array([[float(row[name]) for name in _probabilities(row)] for row in rows])
    labels, said = (np.array([int(row[name]) for row in rows]) for name in ("label", "predicted"))
    count = scores.shape[1]
    names = tuple(classes[i] if i < len(classes) else f"class {i}" for i in range(count))
    confusion = np.zeros((count, count), dtype=int)
    np.add.at(confusion, (labels, said), 1)
    draws = np.random.default_rng(0).integers(0, len(rows), (_DRAWS if len(rows) <= 5000 else 100, len(rows)))
    right = (labels == said).astype(float)
    interval = _wider(np.quantile(right[draws].mean(1), (0.025, 0.975)), wilson(float(right.mean()), len(rows)))
    positives = [1] if count == 2 else range(count)
    both = [_curves(names[k], scores[:, k], labels == k, draws) for k in positives]
    order = np.argsort([-_loss(row) for row in rows], kind="stable")
    return Evaluation(
        names,
        tuple(int(n) for n in np.bincount(labels, minlength=count)),
        tuple(tuple(int(n) for n in row) for row in confusion),
        float(right.mean()),
        *interval,
        tuple(roc for roc, _ in both),
        tuple(recall for _, recall in both),
        tuple(_example(rows[i], scores[i], names) for i in order),
    )


def _example(row: dict[str, str], scores: Array, names: Sequence[str]) -> dict[str, Any]:
    label, said = int(row["label"]), int(row["predicted"])
    return {
        "example": row["example"],
        "label": names[label],
        "predicted": names[said],
        "right": label == said,
        "probability": float(scores[label]),
        "loss": _loss(row),
    }


def _loss(row: dict[str, str]) -> float:
    return float(row.get("loss") or 0.0)


def _curves(name: str, scores: Array, positive: Array, draws: Array) -> tuple[EvaluationCurve, EvaluationCurve]:
    """ROC and precision against recall, with the intervals of both."""
    roc, recall = _roc(scores, positive), _precision_recall(scores, positive)
    again = [(_roc(scores[d], positive[d]), _precision_recall(scores[d], positive[d])) for d in draws]
    found, others = int(positive.sum()), int((~positive).sum())
    area = area_interval(roc[1], found, others), wilson(recall[1], found)
    # Of a rate of true positives the positive examples count; of a precision, what is taken for positive at its recall.
    called = [max(1.0, found * at / max(y, 1e-9)) for at, y in zip(_GRID, recall[0], strict=True)]
    bands = [wilson(y, found) for y in roc[0]], [wilson(y, n) for y, n in zip(recall[0], called, strict=True)]
    return (
        _banded(name, roc, [a for a, _ in again], bands[0], area[0]),
        _banded(name, recall, [b for _, b in again], bands[1], area[1]),
    )


def _wider(drawn: Sequence[float], score: tuple[float, float]) -> tuple[float, float]:
    """The interval from the lower of two lower ends to the upper of two upper ones."""
    return min(float(drawn[0]), score[0]), max(float(drawn[1]), score[1])


def _banded(
    name: str,
    found: tuple[Array, float],
    drawn: Sequence[tuple[Array, float]],
    bands: Sequence[tuple[float, float]],
    score: tuple[float, float],
) -> EvaluationCurve:
    y, area = found
    if np.isnan(area):  # a class is missing
        none = (float("nan"),) * len(y)
        return EvaluationCurve(name, none, none, none, area, float("nan"), float("nan"))
    lines = np.array([line for line, a in drawn if not np.isnan(a)] or [y])
    areas = np.array([a for _, a in drawn if not np.isnan(a)] or [area])
    low, high = np.quantile(lines, (0.025, 0.975), axis=0)
    band = [_wider(ends, at) for ends, at in zip(zip(low, high, strict=True), bands, strict=True)]
    ends = _wider(np.quantile(areas, (0.025, 0.975)), score)
    below, above = (tuple(end) for end in zip(*band, strict=True))
    return EvaluationCurve(name, tuple(map(float, y)), below, above, area, *ends)


def _steps(scores: Array, positive: Array) -> tuple[Array, Array]:
    """True and false positives at every threshold, from the highest score down; equal scores are one threshold."""
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.diff(scores[order], append=-np.inf))
    return np.cumsum(positive[order])[ends], np.cumsum(~positive[order])[ends]


def _roc(scores: Array, positive: Array) -> tuple[Array, float]:
    """The true positive rate over a grid of false positive rates, and the area; NaN where a class is missing."""
    true, false = _steps(scores, positive)
    if not true[-1] or not false[-1]:
        return np.full(len(_GRID), np.nan), float("nan")
    x, y = np.concatenate([[0.0], false / false[-1]]), np.concatenate([[0.0], true / true[-1]])
    area = float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2))
    # At a jump, the upper end: what the network reaches without more false positives.
    upper = np.array([y[np.searchsorted(x, g, side="right") - 1] for g in _GRID])
    return upper, area


def _precision_recall(scores: Array, positive: Array) -> tuple[Array, float]:
    """Precision over a grid of recalls (the best at that recall or more), and the average precision."""
    true, false = _steps(scores, positive)
    if not true[-1]:
        return np.full(len(_GRID), np.nan), float("nan")
    recall, precision = true / true[-1], true / (true + false)
    area = float(np.sum(np.diff(recall, prepend=0.0) * precision))
    best = np.maximum.accumulate(precision[::-1])[::-1]
    at = np.minimum(np.searchsorted(recall, _GRID - 1e-12), len(recall) - 1)
    return best[at], area
