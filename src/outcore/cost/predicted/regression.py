"""Regressions that can be written down: three ways to learn a function, stored as lists of numbers.

Each learns the logarithm of an efficiency from a row of features, and is then nothing but arrays: polynomial
coefficients, the nodes of boosted trees, or the points and weights of a Gaussian process
(`outcore.cost.predicted.gaussian_process`). scikit-learn fits the first two; predicting needs numpy alone and uses the
rounded numbers that are stored, so a calibration that was saved and loaded predicts to the last bit what it predicted
before. No pickle is involved.

    polynomial   degree two in all features, ridge; smooth, cheap, weak where libraries switch algorithms
    trees        gradient boosting; follows jumps, knows nothing between its points
    gaussian     Matérn kernel with one length per feature; best where few points must serve
    blend        the mean of trees and gaussian, whose errors differ
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from outcore.cost.predicted.features import Matrix
from outcore.cost.predicted.gaussian_process import GaussianProcess, LengthScales, find_lengths, fit_gaussian, rounded
from outcore.errors import MachineError

METHODS = ("polynomial", "gaussian", "trees", "blend")
"""From the smallest to the largest when stored."""


class Regression(Protocol):
    """Predicts one number per row of features."""

    def predict(self, rows: Matrix) -> Matrix:
        """One number per row."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Polynomial:
    """A ridge regression on all products of two standardised features."""

    mean: Matrix
    scale: Matrix
    coefficients: Matrix

    def predict(self, rows: Matrix) -> Matrix:
        """One number per row."""
        return _products((rows - self.mean) / self.scale) @ self.coefficients

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return {
            "method": "polynomial",
            **{k: _list(getattr(self, k)) for k in ("mean", "scale", "coefficients")},
        }


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """Boosted trees in one array each; a node's left child follows it, a leaf's feature is -1."""

    start: float
    roots: Matrix
    feature: Matrix
    threshold: Matrix
    right: Matrix
    value: Matrix

    def predict(self, rows: Matrix) -> Matrix:
        """One number per row."""
        feature, right = self.feature.astype(int), self.right.astype(int)
        everyone = np.arange(len(rows))
        total = np.full(len(rows), self.start)
        for root in self.roots.astype(int):
            node = np.full(len(rows), root)
            while (inner := feature[node] >= 0).any():
                goes_left = rows[everyone, feature[node]] <= self.threshold[node]
                node = np.where(inner, np.where(goes_left, node + 1, right[node]), node)
            total += self.value[node]
        return total

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        whole = {k: [int(n) for n in getattr(self, k)] for k in ("roots", "feature", "right")}
        return {
            "method": "trees",
            "start": self.start,
            **whole,
            "threshold": _list(self.threshold),
            "value": _list(self.value),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Blend:
    """The mean of several regressions."""

    parts: tuple[Regression, ...]

    def predict(self, rows: Matrix) -> Matrix:
        """One number per row."""
        return np.asarray(sum(part.predict(rows) for part in self.parts) / len(self.parts))

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return {"method": "blend", "parts": [part.to_json() for part in self.parts]}


def check_can_fit() -> None:
    """Refuse to fit where the packages for it are not installed; predicting needs none of them.

    Raises:
        MachineError: says what to install.
    """
    for name, package in (("sklearn", "scikit-learn"), ("threadpoolctl", "threadpoolctl")):
        if importlib.util.find_spec(name) is None:
            raise MachineError(
                f"fitting a calibration needs {package}, which is not installed; type: pip install 'outcore[calibrate]'"
            )


def fit_regression(
    method: str, rows: Matrix, targets: Matrix, *, lengths: LengthScales | None = None, seed: int = 0
) -> Regression:
    """Fit one of `METHODS`; the result predicts from rounded numbers, as it will after loading."""
    check_can_fit()
    if method == "polynomial":
        return _fit_polynomial(rows, targets)
    if method == "trees":
        return _fit_trees(rows, targets, seed)
    if lengths is None:
        lengths = find_lengths(rows, targets, seed=seed)
    gaussian = fit_gaussian(rows, targets, lengths, seed)
    return gaussian if method == "gaussian" else Blend((_fit_trees(rows, targets, seed), gaussian))


def regression_from_json(document: Mapping[str, Any]) -> Regression:
    """The regression that `to_json` described."""
    arrays = {k: np.array(v, dtype=np.float64) for k, v in document.items() if isinstance(v, list) and k != "parts"}
    if document["method"] == "polynomial":
        return Polynomial(**arrays)
    if document["method"] == "trees":
        return Trees(start=float(document["start"]), **arrays)
    if document["method"] == "gaussian":
        return GaussianProcess.from_json(document)
    return Blend(tuple(regression_from_json(part) for part in document["parts"]))


def _fit_polynomial(rows: Matrix, targets: Matrix) -> Regression:
    from sklearn.linear_model import RidgeCV

    mean, scale = _standard(rows)
    fitted = RidgeCV(alphas=(0.3, 3.0, 30.0, 300.0), fit_intercept=False)
    fitted.fit(_products((rows - mean) / scale), targets)
    return Polynomial(mean, scale, rounded(fitted.coef_))


def _fit_trees(rows: Matrix, targets: Matrix, seed: int) -> Regression:
    from sklearn.ensemble import GradientBoostingRegressor

    # Few points: shallow and fewer trees. The sizes keep a stored calibration within a few hundred kilobytes.
    count, depth = (450, 6) if len(rows) > 500 else (120, 4)
    fitted = GradientBoostingRegressor(
        loss="huber",
        n_estimators=count,
        max_depth=depth,
        learning_rate=0.05 if count > 200 else 0.1,
        subsample=0.5,
        min_samples_leaf=3,
        max_features=0.3,
        random_state=seed,
    )
    fitted.fit(rows, targets)
    start = float(fitted.init_.predict(rows[:1])[0])
    roots: list[float] = []
    feature: list[float] = []
    threshold: list[float] = []
    right: list[float] = []
    value: list[float] = []
    for (estimator,) in fitted.estimators_:
        tree, base = estimator.tree_, len(feature)
        roots.append(base)
        leaf = tree.children_left < 0
        feature += list(np.where(leaf, -1, tree.feature))
        threshold += list(np.where(leaf, 0.0, tree.threshold))
        right += list(np.where(leaf, 0, tree.children_right + base))
        value += list(np.where(leaf, tree.value[:, 0, 0] * fitted.learning_rate, 0.0))
    whole = [np.array(part, dtype=np.float64) for part in (roots, feature, right)]
    return Trees(start, whole[0], whole[1], rounded(threshold), whole[2], rounded(value, 4))


def _standard(rows: Matrix) -> tuple[Matrix, Matrix]:
    spread = rows.std(0)
    # A feature that never varied says nothing: an endless scale takes it out.
    return rounded(rows.mean(0)), rounded(np.where(spread > 1e-9, spread, 1e9))


def _products(rows: Matrix) -> Matrix:
    first, second = np.triu_indices(rows.shape[1])
    return np.hstack([np.ones((len(rows), 1)), rows, rows[:, first] * rows[:, second]])


def _list(values: Matrix) -> list[Any]:
    plain: list[Any] = values.tolist()
    return plain
