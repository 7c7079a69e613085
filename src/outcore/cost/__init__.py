"""Costs: what operations take, measured and predicted."""

from outcore.cost.calibration import Calibration, Prediction, fit_calibration
from outcore.cost.ceiling import Ceiling
from outcore.cost.costs import Costs
from outcore.cost.measure import measure
from outcore.cost.memory import MemoryCurve, memory_curve
from outcore.cost.opmodel import Operation
from outcore.cost.optimizer import OptimizerCost
from outcore.cost.samples import Sample, read_samples
from outcore.cost.saved import account
from outcore.cost.step import StepTime, measure_optimizer, predict_step

__all__ = [
    "Calibration",
    "Ceiling",
    "Costs",
    "MemoryCurve",
    "Operation",
    "OptimizerCost",
    "Prediction",
    "Sample",
    "StepTime",
    "account",
    "fit_calibration",
    "measure",
    "measure_optimizer",
    "memory_curve",
    "predict_step",
    "read_samples",
]
