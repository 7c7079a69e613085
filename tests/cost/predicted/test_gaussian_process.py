"""A Gaussian process: its likelihood is scikit-learn's, and it finds which features matter."""

from __future__ import annotations

import numpy as np
import pytest

from outcore.cost.predicted.gaussian_process import find_lengths, fit_gaussian, negative_likelihood


def test_likelihood_and_gradient_are_those_of_scikit_learn() -> None:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    source = np.random.default_rng(0)
    points = source.normal(size=(50, 4))
    targets = np.sin(points[:, 0]) + 0.1 * source.normal(size=50)
    kernel = ConstantKernel(0.3) * Matern([0.7, 1.7, 4.0, 20.0], nu=1.5) + WhiteKernel(0.02)
    oracle = GaussianProcessRegressor(kernel, optimizer=None).fit(points, targets)
    value, gradient = oracle.log_marginal_likelihood(kernel.theta, eval_gradient=True)
    found, slope = negative_likelihood(kernel.theta, points, targets)
    assert found == pytest.approx(-value, rel=1e-9)
    np.testing.assert_allclose(slope, -gradient, rtol=1e-7)


def test_a_feature_that_says_nothing_gets_a_long_length_or_none() -> None:
    source = np.random.default_rng(1)
    rows = source.normal(size=(300, 3))
    rows[:, 2] = 7.0
    found = find_lengths(rows, np.sin(2 * rows[:, 0]) + 0.01 * source.normal(size=300))
    assert found.lengths[0] < 0.2 * found.lengths[1]
    assert np.isinf(found.lengths[2])


def test_a_contradicted_sample_is_not_followed() -> None:
    rows = np.linspace(0, 6, 120)[:, None]
    targets = np.sin(rows[:, 0])
    targets[60] += 3.0
    fitted = fit_gaussian(rows, targets, find_lengths(rows, targets), seed=0)
    np.testing.assert_allclose(fitted.predict(rows[55:66]), np.sin(rows[55:66, 0]), atol=0.05)
