"""Everything here needs the extra ``keras``; without it, it is skipped. Keras computes in float64."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("keras") and find_spec("tensorflow") else ["test_*.py"]
"""Without the extra nothing here can be imported; importing it here would import TensorFlow for every run."""


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    from tests.keras import oracle

    yield from oracle.in_float64()
