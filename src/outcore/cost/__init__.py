"""Costs: what operations take, measured and predicted."""

from outcore.cost.calibration import Calibration, Prediction, fit_calibration
from outcore.cost.ceiling import Ceiling
from outcore.cost.opmodel import Operation
from outcore.cost.samples import Sample, read_samples

__all__ = [
    "Calibration",
    "Ceiling",
    "Operation",
    "Prediction",
    "Sample",
    "fit_calibration",
    "read_samples",
]
