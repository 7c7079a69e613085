"""Costs by prediction: from shapes, a calibration and a model of the device."""
