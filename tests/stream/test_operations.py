"""Every operation of the catalogue that has a rule for regions, against the whole."""

from __future__ import annotations

import warnings

import pytest

from outcore.errors import StreamError
from outcore.ops import find
from outcore.stream.call import rule
from tests.ops.samples import Sample, samples
from tests.stream.test_regions import Function, check

REFUSED = set(
    "linear layer_norm group_norm rms_norm adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d view reshape "
    "flatten ravel t T getitem".split()
)
"""Calls that need all of the image, as these samples make them."""
LEFT_OUT = set("matmul mean sum split split_with_sizes tensor_split chunk unbind".split())
"""Those with more than one stage or output have tests of their own (`test_regions`)."""


def tiled() -> list[Sample]:
    found = [s for s in samples() if rule.find(s.name) is not None and s.name not in LEFT_OUT]
    return [s for s in found if (op := find(s.name)) is not None and "dropout" not in op.kind]


@pytest.mark.slow
def test_a_region_of_every_operation_equals_that_of_the_whole() -> None:
    refused = set()
    for sample in tiled():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(Function(sample.call), sample.shape, exact=False)
        except StreamError:
            refused.add(sample.name)
        except AssertionError as error:
            raise AssertionError(sample.name) from error
    assert refused == REFUSED
    assert len(tiled()) > 190
