"""The efficiency of one kind of operation in one direction: a bounded number, learned from samples.

Efficiency is roofline time over measured time, in (0, 1]. The regression learns its logarithm, and whatever
it answers is clamped to the range that was seen, so a predicted time can never fall below the roofline or run
away above it.

Outside the box of features that was sampled a regression knows nothing, and the prediction says that it was
extrapolated. Where only more work is done than in any sample (a larger batch, a larger image) the operation is halved,
first its batch and then its image, until it lies in the box, and that one's efficiency is the answer: beyond what was
sampled time grows with the work, no faster and no slower. Where the operation is of another shape (wider, a longer
kernel) the features are moved to the edge of the box, and half of the remaining confidence goes to the plain model for
every doubling beyond it: a start, which is the shortest time seen, and after it work at one share of the ceiling's
rates. That share is the median of the samples, with three more assumed that reached half of the rates: of a few samples
the median says little, of none there is nothing else.

Which regression to use is decided by cross-validation on the samples themselves, and the errors of the chosen
one on samples it had not seen are stored beside it. A smaller method wins unless a larger one is better by a
margin: what is stored must stay small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from outcore.cost.measured.samples import Sample
from outcore.cost.predicted.features import NAMES, Matrix, features
from outcore.cost.predicted.gaussian_process import LengthScales, find_lengths
from outcore.cost.predicted.operation import Operation
from outcore.cost.predicted.regression import METHODS, Regression, fit_regression, regression_from_json
from outcore.cost.predicted.roofline import UNFITTED_EFFICIENCY, Ceiling

_FOLDS = 5
_MARGIN = 0.98
_LEAST_SAMPLES = 20
_TOLERANCE = 0.02
_ASSUMED = 3
"""Samples that what is assumed counts for."""
_STARTED = 2.0
"""Operations that take less than so many times their start say nothing of rates."""
_FEW, _SPREAD_OF_FEW = 8, (0.5, 2.0)
# More of the same (images, pixels) leaves efficiency where the largest samples had it.
_GROWTH = np.isin(NAMES, ("flops", "bytes", "batch", "in_pixels", "out_pixels", "shortest_side", "rows", "waves"))
_GROWTH |= np.isin(NAMES, ("in_elements", "out_elements"))


@dataclass(frozen=True, slots=True, eq=False)
class Efficiency:
    """What was learned of one kind and direction."""

    ceiling: Ceiling
    method: str
    regression: Regression | None
    low: Matrix
    high: Matrix
    """Edges of the sampled box, feature by feature."""
    least: float
    median: float
    samples: int
    errors: Mapping[str, float]
    """Held-out errors of the chosen method as shares of the measured time: median, p90; and those of each
    method."""
    spread: tuple[float, float]
    """Held-out ratios of measured to predicted time, tenth and ninetieth percentile."""
    dispatch_s: float
    """Median time the host needs to launch it."""
    rate: float = 0.0
    """Share of the ceiling's rates that work reaches after the start; 0 where the median efficiency stands for it."""

    def predict(self, operations: Sequence[Operation]) -> tuple[Matrix, Matrix]:
        """Efficiency of each operation, and how many doublings outside the sampled box it lies."""
        rows = features(operations, self.ceiling)
        beyond = np.maximum(np.abs(rows - np.clip(rows, self.low, self.high)).max(1) - _TOLERANCE, 0.0)
        for i in np.flatnonzero((rows > self.high + _TOLERANCE)[:, _GROWTH].any(1)):
            rows[i] = self._shrunk(operations[int(i)])
        edge = np.clip(rows, self.low, self.high)
        strange = np.maximum(
            np.abs(np.where(_GROWTH, np.minimum(rows, self.high), rows) - edge).max(1) - _TOLERANCE, 0.0
        )
        middle = self._plain(operations)
        logs = self.regression.predict(edge) if self.regression is not None else middle
        trust = 0.5**strange
        mixed = trust * logs + (1 - trust) * middle
        return np.exp(np.clip(mixed, np.log(self.least), 0.0)), beyond

    def _plain(self, operations: Sequence[Operation]) -> Matrix:
        """Logarithms of the efficiency of a start, and after it work at one rate."""
        if not self.rate:
            return np.full(len(operations), np.log(self.median))
        return _of_start_and_rate(operations, self.ceiling, self.rate)

    def _shrunk(self, operation: Operation) -> Matrix:
        """The features of an operation of the same shape with less work, within the sampled box if that is possible."""
        row = features([operation], self.ceiling)[0]
        for _ in range(60):
            smaller = _halved(operation)
            if smaller is None or not (row > self.high + _TOLERANCE)[_GROWTH].any():
                break
            operation, row = smaller, features([smaller], self.ceiling)[0]
        return np.asarray(row)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dictionaries and numbers."""
        return {
            "ceiling": asdict(self.ceiling),
            "method": self.method,
            "regression": self.regression.to_json() if self.regression is not None else None,
            "low": self.low.tolist(),
            "high": self.high.tolist(),
            "least": self.least,
            "median": self.median,
            "samples": self.samples,
            "errors": dict(self.errors),
            "spread": list(self.spread),
            "dispatch_s": self.dispatch_s,
            "rate": self.rate,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Efficiency:
        """The efficiency that `to_json` described."""
        stored = document["regression"]
        return cls(
            ceiling=Ceiling(**document["ceiling"]),
            method=document["method"],
            regression=regression_from_json(stored) if stored is not None else None,
            low=np.array(document["low"]),
            high=np.array(document["high"]),
            least=document["least"],
            median=document["median"],
            samples=document["samples"],
            errors=document["errors"],
            spread=(document["spread"][0], document["spread"][1]),
            dispatch_s=document["dispatch_s"],
            rate=document.get("rate", 0.0),
        )


def _halved(operation: Operation) -> Operation | None:
    """Half of the batch, else half of the longest side; none where neither can be halved."""
    if operation.batch > 1:
        return replace(operation, batch=(operation.batch + 1) // 2)
    if not operation.size or operation.kind == "attention":
        return None
    longest = max(range(len(operation.size)), key=operation.size.__getitem__)
    reach = [d * (k - 1) + 1 for d, k in zip(operation.dilation, operation.kernel, strict=False)]
    least = reach[longest] if reach else 1
    if operation.size[longest] // 2 < max(8, least):
        return None
    size = tuple(n // 2 if i == longest else n for i, n in enumerate(operation.size))
    return replace(operation, size=size)


def fit_efficiency(
    samples: Sequence[Sample], base: Ceiling, *, methods: Sequence[str] = METHODS, seed: int = 0
) -> Efficiency:
    """Learn from samples of one kind in one direction, one or many."""
    ceiling = base.raised(samples)
    rows = features([sample.operation for sample in samples], ceiling)
    measured = np.array([sample.timing.median_s for sample in samples])
    targets = np.log(np.array([ceiling.time_s(sample.operation) for sample in samples]) / measured)
    rate = _rate_after_start(samples, ceiling)
    plain = _of_start_and_rate([sample.operation for sample in samples], ceiling, rate)
    residuals: dict[str, Matrix] = {"rate": targets - plain}
    lengths = None
    if len(samples) >= _LEAST_SAMPLES:
        if "gaussian" in methods or "blend" in methods:
            lengths = find_lengths(rows, targets, seed=seed)
        residuals |= _held_out_residuals(methods, rows, targets, lengths, seed)
    chosen = "rate"
    for method, residual in residuals.items():
        if _error(residual, 50) < _MARGIN * _error(residuals[chosen], 50):
            chosen = method
    # log(roofline / measured) - log(efficiency) is log(predicted / measured).
    ratios = np.exp(-residuals[chosen])
    low, high = float(np.percentile(ratios, 10)), float(np.percentile(ratios, 90))
    if len(samples) < _FEW:
        low, high = min(low, _SPREAD_OF_FEW[0]), max(high, _SPREAD_OF_FEW[1])
    errors = {"median": _error(residuals[chosen], 50), "p90": _error(residuals[chosen], 90)}
    errors |= {f"median of {method}": _error(residual, 50) for method, residual in residuals.items()}
    return Efficiency(
        ceiling=ceiling,
        method=chosen,
        regression=fit_regression(chosen, rows, targets, lengths=lengths, seed=seed) if chosen != "rate" else None,
        low=rows.min(0),
        high=rows.max(0),
        least=float(np.exp(min(targets.min(), plain.min(), np.log(rate / 2)))),
        median=float(np.exp(np.median(targets))),
        samples=len(samples),
        errors={name: float(f"{error:.4g}") for name, error in errors.items()},
        spread=(low, high),
        dispatch_s=float(np.median([sample.timing.dispatch_s for sample in samples])),
        rate=rate,
    )


def _rate_after_start(samples: Sequence[Sample], ceiling: Ceiling) -> float:
    """The share of the ceiling's rates that work reaches: the median of the samples that are more than a start."""
    found = [
        min(1.0, ceiling.work_s(sample.operation) / (sample.timing.median_s - ceiling.floor_s))
        for sample in samples
        if sample.timing.median_s > _STARTED * ceiling.floor_s
    ]
    assumed = _ASSUMED * np.log(UNFITTED_EFFICIENCY)
    measured = len(found) * float(np.median(np.log(found))) if found else 0.0
    return float(np.exp((measured + assumed) / (len(found) + _ASSUMED)))


def _of_start_and_rate(operations: Sequence[Operation], ceiling: Ceiling, rate: float) -> Matrix:
    """Logarithms of roofline over start and work, for each operation."""
    roofline = np.array([ceiling.time_s(operation) for operation in operations])
    work = np.array([ceiling.work_s(operation) for operation in operations])
    return np.asarray(np.minimum(0.0, np.log(roofline / (ceiling.floor_s + work / rate))))


def _held_out_residuals(
    methods: Sequence[str], rows: Matrix, targets: Matrix, lengths: LengthScales | None, seed: int
) -> dict[str, Matrix]:
    """What each method misses on samples that its fit had not seen.

    The lengths of the Gaussian process come from all samples, the fits do not.
    """
    predicted = {method: np.zeros(len(targets)) for method in methods}
    order = np.random.default_rng(seed).permutation(len(targets))
    for part in np.array_split(order, _FOLDS):
        others = np.setdiff1d(order, part)
        for method in methods:
            if method == "blend" and {"trees", "gaussian"} <= set(methods):  # both come before it
                predicted[method][part] = (predicted["trees"][part] + predicted["gaussian"][part]) / 2
                continue
            fitted = fit_regression(method, rows[others], targets[others], lengths=lengths, seed=seed)
            predicted[method][part] = np.clip(fitted.predict(rows[part]), targets[others].min(), 0.0)
    return {method: targets - values for method, values in predicted.items()}


def _error(residuals: Matrix, percentile: float) -> float:
    return float(np.percentile(np.abs(np.exp(residuals) - 1), percentile))
