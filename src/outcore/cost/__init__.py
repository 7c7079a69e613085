"""Costs: what operations take, measured and predicted."""

from outcore.cost.costs import Costs
from outcore.cost.measured.measure import measure
from outcore.cost.measured.samples import Sample, read_samples
from outcore.cost.measured.saved_bytes import account
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.calibration import Calibration, Prediction, fit_calibration
from outcore.cost.predicted.operation import Operation
from outcore.cost.predicted.roofline import Ceiling
from outcore.cost.predicted.step_memory import MemoryCurve, memory_curve
from outcore.cost.predicted.step_time import StepTime, measure_optimizer, predict_step

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
