"""A Gaussian process: a prediction from the neighbours of a point.

The kernel is Matérn's of order 3/2 with one length per feature. Three things are found in turn: the lengths, over which
distance each feature matters; which samples the others contradict; and the weights of all.

The lengths are the most likely ones, by gradient. For all lengths at once the gradient costs two matrix products, since
the kernel's derivative by a length is a weight times a squared difference: a second for 400 samples of sixty features.
Sixty lengths fit the samples at hand better than they generalise, so the prior of a length is ten standard deviations,
give or take a factor of e.

A sample that its neighbours contradict (a library that takes another algorithm for one shape is ten times slower there)
is not followed: it gets the contradiction as its noise. What the others predict for a sample is known without fitting
again, from the inverse of the gram matrix.

    Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, sections 5.4.1 and 5.4.2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outcore.cost.predicted.features import Matrix

_MOST_POINTS = 3000
_LENGTH_POINTS = 800
_STEPS = 60
_BEFOREHAND, _GIVE_OR_TAKE = np.log(10.0), 1.0
"""The prior of a length, as a logarithm in standard deviations of the feature."""
_START = (0.3, 5.0, 0.02)
_BOUNDS = ((1e-2, 1e2), (0.3, 1e3), (1e-4, 1.0))
"""Variance of the function, lengths in standard deviations, variance of the noise."""
_JITTER = 1e-10
_ROUNDS = 4
_LEAST_NOISE = 0.01
_APART, _DOUBTED = 3.0, 2.0
"""A sample that the others contradict by so many standard deviations is left out of finding lengths, or is doubted."""
_LONG = 30.0
"""A length of so many standard deviations means that a feature does not matter; it is not stored."""


@dataclass(frozen=True, slots=True, eq=False)
class GaussianProcess:
    """The mean of a Gaussian process: weights on points."""

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
        arrays = {k: getattr(self, k).tolist() for k in ("columns", "mean", "scale", "points", "weights")}
        return {"method": "gaussian", "centre": self.centre, **arrays}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> GaussianProcess:
        """The process that `to_json` described."""
        arrays = {k: np.array(v, dtype=np.float64) for k, v in document.items() if isinstance(v, list)}
        return cls(centre=float(document["centre"]), **arrays)


@dataclass(frozen=True, slots=True, eq=False)
class LengthScales:
    """What a Gaussian process assumes: over which distance each feature matters, and how noisy the targets are."""

    lengths: Matrix
    noise: float
    """Variance of the noise over that of the function."""


def find_lengths(rows: Matrix, targets: Matrix, *, seed: int = 0) -> LengthScales:
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


def fit_gaussian(rows: Matrix, targets: Matrix, lengths: LengthScales, seed: int) -> GaussianProcess:
    """The process through so many samples as are stored, doubting those that the others contradict."""
    kept = np.sort(np.random.default_rng(seed).permutation(len(rows))[:_MOST_POINTS])
    return gaussian_process(rows[kept], targets[kept], lengths, centre=float(np.median(targets)), doubted=_DOUBTED)


def gaussian_process(
    rows: Matrix, targets: Matrix, lengths: LengthScales, *, centre: float, doubted: float | None = None
) -> GaussianProcess:
    """The process through all rows, which is `centre` far from them; with `doubted`, not through those that the others
    contradict by so many standard deviations."""
    columns = np.flatnonzero(np.isfinite(lengths.lengths))
    mean, scale = rounded(rows[:, columns].mean(0)), rounded(lengths.lengths[columns])
    points = rounded((rows[:, columns] - mean) / scale, 3)
    gram = _matern(points, points)
    noises = np.full(len(rows), lengths.noise)
    if doubted is not None:
        noises = _noises(gram, targets - centre, lengths.noise, doubted)
    weights = rounded(np.linalg.solve(gram + np.diag(noises), targets - centre))
    return GaussianProcess(columns.astype(np.float64), mean, scale, points, weights, centre)


def negative_likelihood(parameters: Matrix, points: Matrix, targets: Matrix) -> tuple[float, Matrix]:
    """How unlikely the targets are, and its gradient, by the logarithms of variance, lengths and noise."""
    from scipy.linalg import cho_factor, cho_solve

    variance, lengths, noise = np.exp(parameters[0]), np.exp(parameters[1:-1]), np.exp(parameters[-1])
    scaled = points / lengths
    distance = _distances(scaled, scaled)
    decay = variance * np.exp(-distance)
    signal = (1 + distance) * decay
    eye = np.eye(len(targets))
    factor = cho_factor(signal + (noise + _JITTER) * eye, lower=True)
    weights = cho_solve(factor, targets)
    value = 0.5 * targets @ weights + np.log(np.diag(factor[0])).sum() + 0.5 * len(targets) * np.log(2 * np.pi)
    # The derivative by anything in the kernel is minus half the trace of this times the kernel's derivative.
    slope = np.outer(weights, weights) - cho_solve(factor, eye)
    pull = 3 * slope * decay
    by_lengths = (scaled**2).T @ pull.sum(1) - (scaled * (pull @ scaled)).sum(0)
    gradient = [0.5 * (slope * signal).sum(), *by_lengths, 0.5 * noise * np.trace(slope)]
    return float(value), -np.array(gradient)


def _likely(rows: Matrix, targets: Matrix, seed: int) -> LengthScales:
    """The most likely lengths and noise for a random part of the samples."""
    from scipy.optimize import minimize
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    spread = rows.std(0)
    varying = np.flatnonzero(spread > 1e-9)
    some = np.random.default_rng(seed).permutation(len(rows))[:_LENGTH_POINTS]
    scaled = (rows[some][:, varying] - rows[:, varying].mean(0)) / spread[varying]
    counts = (1, len(varying), 1)
    start = np.log(np.repeat(_START, counts))
    bounds = np.log(np.repeat(_BOUNDS, counts, axis=0))
    centred = targets[some] - targets.mean()

    def unlikely(parameters: Matrix) -> tuple[float, Matrix]:
        value, gradient = negative_likelihood(parameters, scaled, centred)
        away = (parameters[1:-1] - _BEFOREHAND) / _GIVE_OR_TAKE
        gradient[1:-1] += away / _GIVE_OR_TAKE
        return value + 0.5 * float(away @ away), gradient

    # Matrices this small only wait for each other on several cores.
    with threadpool_limits(1):
        found = minimize(unlikely, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": _STEPS})
    variance, relevant, noise = np.exp(found.x[0]), np.exp(found.x[1:-1]), np.exp(found.x[-1])
    lengths = np.full(rows.shape[1], np.inf)
    lengths[varying] = np.where(relevant < _LONG, relevant * spread[varying], np.inf)
    return LengthScales(lengths, float(noise / variance))


def _noises(gram: Matrix, targets: Matrix, noise: float, apart: float) -> Matrix:
    """The variance of each sample's noise: that of all, or its own where the others contradict it."""
    found = np.full(len(targets), noise)
    for _ in range(_ROUNDS):
        inverse = np.linalg.inv(gram + np.diag(found))
        contradiction = np.abs((inverse @ targets) / np.diag(inverse))
        usual = 1.4826 * float(np.median(contradiction))
        found = np.where(contradiction > apart * usual, np.maximum(noise, contradiction**2), noise)
    return np.asarray(found)


def _matern(a: Matrix, b: Matrix) -> Matrix:
    distance = _distances(a, b)
    return np.asarray((1 + distance) * np.exp(-distance))


def _distances(a: Matrix, b: Matrix) -> Matrix:
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    return np.asarray(np.sqrt(3 * np.maximum(squares, 0.0)))


def rounded(values: Any, digits: int = 6) -> Matrix:
    """The numbers as they are stored."""
    array = np.asarray(values, dtype=np.float64)
    return np.array([float(f"{value:.{digits}g}") for value in array.ravel()]).reshape(array.shape)
