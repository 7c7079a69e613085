"""When Triton's interpreter can run kernels on the CPU, as marks of a test."""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest

__all__ = ["INTERPRETED", "too_new"]


def _old_triton() -> bool:
    try:
        return tuple(map(int, version("triton").split(".")[:2])) < (3, 7)
    except PackageNotFoundError:
        return False


too_new = _old_triton() and np.lib.NumpyVersion(np.__version__) >= "2.4.0"
"""Whether numpy refuses the loops of Triton 3.6's interpreter of a length given at run time, an array of one number."""

INTERPRETED = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.skipif(too_new, reason="the interpreter of Triton 3.6 needs numpy < 2.4"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the interpreter
]
