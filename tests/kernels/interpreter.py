"""When Triton's interpreter can run kernels on the CPU, as marks of a test."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest

__all__ = ["INTERPRETED", "too_new"]

too_new = np.lib.NumpyVersion(np.__version__) >= "2.4.0"
"""Whether numpy refuses the interpreter's loops of a length given at run time, an array of one number to it."""

INTERPRETED = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.skipif(too_new, reason="Triton's interpreter needs numpy < 2.4"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the interpreter
]
