"""What operations take inside of networks, over what they take in a sweep.

A calibration is fitted to random shapes, one after the other in a warm cache. Networks are not random: their layers
have certain widths and kernels, for which libraries have certain algorithms, and a call finds in the cache only what
the one before it left. So a prediction for a call of a network takes two more steps:

- nothing is faster than its bytes beyond the cache can cross the memory bus;
- the rest is multiplied by a factor: a Gaussian process over the logarithm of measured over predicted time, of calls
  that real networks ran. Far from all of them it is 1, and the calibration is used as it is.

The process has fixed lengths (two standard deviations per feature, the same for all kinds) instead of fitted ones:
calls of a dozen networks are too few and too similar to choose sixty lengths by. How well it generalises is known by
leaving out all calls of one network at a time, and stored beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from outcore.cost.predicted.features import NAMES, Matrix, features
from outcore.cost.predicted.gaussian_process import GaussianProcess, LengthScales, gaussian_process
from outcore.cost.predicted.operation import Operation
from outcore.machine.device import Device

if TYPE_CHECKING:
    from outcore.cost.predicted.calibration import Calibration, Prediction

STREAMED = 0.85
"""Share of the memory's rate that long element-wise kernels reach."""
_CACHED = 25_000_000
"""Bytes that a call finds in the cache: half of what recent GPUs have, most of what cores share."""
_MOST = 8.0
"""No factor is larger, or smaller than one over it."""
_LEAST_SAMPLES = 12
_LEAST_S = 8e-6
"""Shorter calls are dominated by the launch and are not learned from."""
_LENGTH, _NOISE, _LEAST_SPREAD = 2.0, 0.1, 0.1
_COLUMNS = np.flatnonzero(
    np.isin(
        NAMES,
        (
            "flops bytes ridge batch in_channels out_channels groups in_pixels out_pixels kernel stride even_in "
            "padded_in padded_out tile_and_memory few_channels pointwise input_grad last_wave bias channels_last"
        ).split(),
    )
    | np.char.startswith(NAMES, "variant_")
)


@dataclass(frozen=True, slots=True)
class OperationUse:
    """An operation as a network ran it."""

    operation: Operation
    time_s: float
    """Without what is moved beside it (`outcore.cost.predicted.memory_traffic`)."""
    network: str
    alone_s: float = 0.0
    """What the calibration predicts for it; 0 before it was asked."""


@dataclass(frozen=True, slots=True, eq=False)
class InNetworkRatio:
    """The factor for one kind of operation in one direction."""

    regression: GaussianProcess
    samples: int
    errors: Mapping[str, float]
    """Median error on networks that were left out: "alone" without the factor, "inside" with it."""

    def factors(self, rows: Matrix) -> Matrix:
        """One factor per row of features."""
        return np.clip(np.exp(self.regression.predict(rows)), 1 / _MOST, _MOST)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dictionaries and numbers."""
        return {"regression": self.regression.to_json(), "samples": self.samples, "errors": dict(self.errors)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> InNetworkRatio:
        """The usage that `to_json` described."""
        return cls(GaussianProcess.from_json(document["regression"]), document["samples"], document["errors"])


def inside_a_network(calibration: Calibration, operations: Sequence[Operation], device: Device) -> list[Prediction]:
    """What operations of one precision take as calls of a network."""
    cold = _cold(calibration, operations, device)
    groups: dict[str, list[int]] = {}
    for place, operation in enumerate(operations):
        if (name := _name(operation)) in calibration.usage:
            groups.setdefault(name, []).append(place)
    for name, places in groups.items():
        rows = features([operations[place] for place in places], calibration.base)
        for place, factor in zip(places, calibration.usage[name].factors(rows), strict=True):
            cold[place] = _times(cold[place], float(factor))
    return cold


def predicted_alone(used: Sequence[OperationUse], calibration: Calibration, device: Device) -> list[OperationUse]:
    """The uses of the calibration's precision that are long enough to learn from, with its predictions."""
    chosen = [call for call in used if call.time_s > _LEAST_S and call.operation.dtype == calibration.dtype]
    predicted = _cold(calibration, [call.operation for call in chosen], device)
    return [replace(call, alone_s=p.time_s) for call, p in zip(chosen, predicted, strict=True)]


def fit_usage(used: Sequence[OperationUse], calibration: Calibration) -> dict[str, InNetworkRatio]:
    """Factors for every kind and direction that networks ran often enough, where they help with networks left out.

    `used` comes from `predicted_alone`.
    """
    groups: dict[str, list[OperationUse]] = {}
    for call in used:
        groups.setdefault(_name(call.operation), []).append(call)
    fitted = {name: _fit(calls, calibration) for name, calls in groups.items() if len(calls) >= _LEAST_SAMPLES}
    return {name: usage for name, usage in fitted.items() if usage.errors["inside"] < usage.errors["alone"]}


def _fit(calls: Sequence[OperationUse], calibration: Calibration) -> InNetworkRatio:
    rows = features([call.operation for call in calls], calibration.base)
    targets = np.log(np.array([call.time_s / call.alone_s for call in calls]))
    lengths = np.full(rows.shape[1], np.inf)
    lengths[_COLUMNS] = _LENGTH * np.maximum(rows[:, _COLUMNS].std(0), _LEAST_SPREAD)
    shape = LengthScales(lengths, _NOISE)
    networks = np.array([call.network for call in calls])
    residuals = targets.copy()
    for name in set(networks):
        others = networks != name
        if others.sum() >= _LEAST_SAMPLES:
            fitted = gaussian_process(rows[others], targets[others], shape, centre=0.0)
            residuals[~others] -= fitted.predict(rows[~others])
    errors = {"alone": _median(targets), "inside": _median(residuals)}
    return InNetworkRatio(gaussian_process(rows, targets, shape, centre=0.0), len(calls), errors)


def _cold(calibration: Calibration, operations: Sequence[Operation], device: Device) -> list[Prediction]:
    """Predictions with little in the cache: operations were sampled with everything in it."""
    found = []
    for operation, prediction in zip(operations, calibration.predict(operations), strict=True):
        cold_s = (operation.nbytes - _CACHED) / (STREAMED * device.bandwidth_bytes_per_s) if operation.nbytes else 0.0
        time_s = max(prediction.time_s, cold_s)
        found.append(replace(prediction, time_s=time_s, high_s=max(prediction.high_s, time_s)))
    return found


def _times(prediction: Prediction, factor: float) -> Prediction:
    """A prediction with its factor; the roofline stays a lower bound."""
    time_s = max(prediction.roofline_s, prediction.time_s * factor)
    return replace(
        prediction,
        time_s=time_s,
        low_s=max(prediction.roofline_s, min(time_s, prediction.low_s * factor)),
        high_s=max(time_s, prediction.high_s * factor),
    )


def _name(operation: Operation) -> str:
    return f"{operation.kind}/{operation.direction}"


def _median(logarithms: Matrix) -> float:
    return float(f"{np.median(np.abs(np.exp(-logarithms) - 1)):.4g}")
