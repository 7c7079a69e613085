"""Regressions that can be written down: three ways to learn a function, stored as lists of numbers.

Each learns the logarithm of an efficiency from a row of features, and is then nothing but arrays: polynomial
coefficients, the nodes of boosted trees, or the points and weights of a Gaussian process. scikit-learn does
the fitting; predicting needs numpy alone and uses the rounded numbers that are stored, so a calibration that
was saved and loaded predicts to the last bit what it predicted before. No pickle is involved.

    polynomial   degree two in all features, ridge; smooth, cheap, weak where libraries switch algorithms
    trees        gradient boosting; follows jumps, knows nothing between its points
    gaussian     Matérn kernel with one length per feature; best where few points must serve
    blend        the mean of trees and gaussian, whose errors differ
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from outcore.cost.features import Matrix

__all__ = [
    "METHODS",
    "Gaussian",
    "Lengths",
    "Regression",
    "find_lengths",
    "fit_regression",
    "gaussian_process",
    "regression_from_json",
]

METHODS = ("polynomial", "gaussian", "trees", "blend")
"""From the smallest to the largest when stored."""

_MOST_POINTS = 2000
_HYPERPARAMETER_POINTS = 400
_ROUNDS = 4
_LEAST_NOISE = 0.01
_APART, _DOUBTED = 3.0, 2.0
"""Standard deviations by which the others contradict a sample that is left out of finding lengths, or is doubted."""
_LONG = 30.0
"""A length of so many standard deviations says that a feature does not matter; it is not stored."""


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
class Gaussian:
    """The mean of a Gaussian process: weights on points, through a Matérn kernel of order 3/2."""

    columns: Matrix
    mean: Matrix
    scale: Matrix
    points: Matrix
    weights: Matrix
    centre: float

    def predict(self, rows: Matrix) -> Matrix:
        """One number per row."""
        scaled = (rows[:, self.columns.astype(int)] - self.mean) / self.scale
        return np.asarray(_matern(scaled, self.points) @ self.weights + self.centre)

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        arrays = {k: _list(getattr(self, k)) for k in ("columns", "mean", "scale", "points", "weights")}
        return {"method": "gaussian", "centre": self.centre, **arrays}


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


def fit_regression(
    method: str, rows: Matrix, targets: Matrix, *, lengths: Lengths | None = None, seed: int = 0
) -> Regression:
    """Fit one of `METHODS`; the result predicts from rounded numbers, as it will after loading."""
    if method == "polynomial":
        return _fit_polynomial(rows, targets)
    if method == "trees":
        return _fit_trees(rows, targets, seed)
    if lengths is None:
        lengths = find_lengths(rows, targets, seed=seed)
    gaussian = _fit_gaussian(rows, targets, lengths, seed)
    return gaussian if method == "gaussian" else Blend((_fit_trees(rows, targets, seed), gaussian))


def regression_from_json(document: Mapping[str, Any]) -> Regression:
    """The regression that `to_json` described."""
    arrays = {k: np.array(v, dtype=np.float64) for k, v in document.items() if isinstance(v, list) and k != "parts"}
    if document["method"] == "polynomial":
        return Polynomial(**arrays)
    if document["method"] == "trees":
        return Trees(start=float(document["start"]), **arrays)
    if document["method"] == "gaussian":
        return Gaussian(centre=float(document["centre"]), **arrays)
    return Blend(tuple(regression_from_json(part) for part in document["parts"]))


def _fit_polynomial(rows: Matrix, targets: Matrix) -> Regression:
    from sklearn.linear_model import RidgeCV

    mean, scale = _standard(rows)
    fitted = RidgeCV(alphas=(0.3, 3.0, 30.0, 300.0), fit_intercept=False)
    fitted.fit(_products((rows - mean) / scale), targets)
    return Polynomial(mean, scale, _rounded(fitted.coef_))


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
    return Trees(start, whole[0], whole[1], _rounded(threshold), whole[2], _rounded(value, 4))


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """What a Gaussian process assumes: over which distance each feature matters, and how noisy the targets
    are."""

    lengths: Matrix
    noise: float
    """Variance of the noise over that of the function."""


def find_lengths(rows: Matrix, targets: Matrix, *, seed: int = 0) -> Lengths:
    """The most likely lengths and noise; a feature that never varies gets none.

    They are found twice: samples that their neighbours contradict say nothing about how far a feature reaches, and are
    left out the second time.
    """
    first = _likely(rows, targets, seed)
    lengths, noise = first.lengths, max(first.noise, _LEAST_NOISE)
    if not np.isfinite(lengths).any():  # a few wild samples make everything look like noise
        spread = rows.std(0)
        lengths, noise = np.where(spread > 1e-9, 2 * spread, np.inf), _LEAST_NOISE
    points = rows / lengths
    apart = _noises(_matern(points, points), targets - np.median(targets), noise, _APART) > noise
    return _likely(rows[~apart], targets[~apart], seed) if apart.any() else first


def _likely(rows: Matrix, targets: Matrix, seed: int) -> Lengths:
    """The most likely lengths and noise for a random part of the samples."""
    from scipy.optimize import minimize
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    def few_steps(objective: Any, start: Any, bounds: Any) -> tuple[Any, Any]:
        found = minimize(objective, start, jac=True, bounds=bounds, method="L-BFGS-B", options={"maxiter": 40})
        return found.x, found.fun

    spread = rows.std(0)
    varying = np.flatnonzero(spread > 1e-9)
    some = np.random.default_rng(seed).permutation(len(rows))[:_HYPERPARAMETER_POINTS]
    scaled = rows[some][:, varying] / spread[varying]
    kernel = ConstantKernel(0.3, (1e-2, 1e2)) * Matern(
        np.full(len(varying), 5.0), length_scale_bounds=(0.3, 1e3), nu=1.5
    ) + WhiteKernel(0.02, (1e-4, 1.0))
    # Matrices this small only wait for each other on several cores.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")  # a length at its bound only says that a feature does not matter
        process = GaussianProcessRegressor(kernel, optimizer=few_steps, random_state=seed)
        process.fit(scaled, targets[some] - targets.mean())
    matern = process.kernel_.k1
    lengths = np.full(rows.shape[1], np.inf)
    relevant = np.atleast_1d(matern.k2.length_scale)
    lengths[varying] = np.where(relevant < _LONG, relevant * spread[varying], np.inf)
    return Lengths(lengths, float(process.kernel_.k2.noise_level / matern.k1.constant_value))


def _noises(gram: Matrix, targets: Matrix, noise: float, apart: float) -> Matrix:
    """The variance of each sample's noise: that of all, or its own where the others contradict it.

    A library that takes another algorithm for one shape is ten times slower there, and a fit that goes through that
    point is wrong around it. What the others say of a sample is known without fitting again, from the inverse of the
    gram matrix.
    """
    found = np.full(len(targets), noise)
    for _ in range(_ROUNDS):
        inverse = np.linalg.inv(gram + np.diag(found))
        contradiction = np.abs((inverse @ targets) / np.diag(inverse))
        usual = 1.4826 * float(np.median(contradiction))
        found = np.where(contradiction > apart * usual, np.maximum(noise, contradiction**2), noise)
    return np.asarray(found)


def _fit_gaussian(rows: Matrix, targets: Matrix, lengths: Lengths, seed: int) -> Regression:
    kept = np.sort(np.random.default_rng(seed).permutation(len(rows))[:_MOST_POINTS])
    return gaussian_process(rows[kept], targets[kept], lengths, centre=float(np.median(targets)), doubted=_DOUBTED)


def gaussian_process(
    rows: Matrix, targets: Matrix, lengths: Lengths, *, centre: float, doubted: float | None = None
) -> Gaussian:
    """The process through all rows, which is `centre` far from them; with `doubted`, not through those that the others
    contradict by so many standard deviations."""
    columns = np.flatnonzero(np.isfinite(lengths.lengths))
    mean, scale = _rounded(rows[:, columns].mean(0)), _rounded(lengths.lengths[columns])
    points = _rounded((rows[:, columns] - mean) / scale, 4)
    gram = _matern(points, points)
    noises = np.full(len(rows), lengths.noise)
    if doubted is not None:
        noises = _noises(gram, targets - centre, lengths.noise, doubted)
    weights = _rounded(np.linalg.solve(gram + np.diag(noises), targets - centre))
    return Gaussian(columns.astype(np.float64), mean, scale, points, weights, centre)


def _matern(a: Matrix, b: Matrix) -> Matrix:
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    distance = np.sqrt(3 * np.maximum(squares, 0.0))
    return np.asarray((1 + distance) * np.exp(-distance))


def _standard(rows: Matrix) -> tuple[Matrix, Matrix]:
    spread = rows.std(0)
    # A feature that never varied says nothing: an endless scale takes it out.
    return _rounded(rows.mean(0)), _rounded(np.where(spread > 1e-9, spread, 1e9))


def _products(rows: Matrix) -> Matrix:
    first, second = np.triu_indices(rows.shape[1])
    return np.hstack([np.ones((len(rows), 1)), rows, rows[:, first] * rows[:, second]])


def _rounded(values: Any, digits: int = 6) -> Matrix:
    array = np.asarray(values, dtype=np.float64)
    return np.array([float(f"{value:.{digits}g}") for value in array.ravel()]).reshape(array.shape)


def _list(values: Matrix) -> list[Any]:
    plain: list[Any] = values.tolist()
    return plain
