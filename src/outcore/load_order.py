"""Triton before TensorFlow.

Each brings a copy of LLVM, and a process that loads Triton after TensorFlow ends with a segmentation fault; torch loads
Triton as soon as an optimizer is made. The other order works. So from the moment that outcore is imported, Triton is
loaded when TensorFlow is about to be; and where TensorFlow was there before outcore, Triton is kept out.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import os
import re
import sys
from typing import Any

__all__ = ["settle_triton", "watch"]


def settle_triton(source: str = "keras") -> None:
    """Load Triton before TensorFlow is, or keep it from being loaded after it.

    Args:
        source: Python text that is about to run; nothing is loaded for one that speaks of neither.
    """
    named = re.search(r"\b(keras|tensorflow)\b", source) is not None
    if named:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # warnings and errors, not what the processor can do
    if "triton" in sys.modules:
        return
    if "tensorflow" in sys.modules:
        sys.modules["triton"] = None  # type: ignore[assignment]  # importing it is an ImportError from now on
    elif named and importlib.util.find_spec("tensorflow") is not None:
        with contextlib.suppress(ImportError):
            importlib.import_module("triton")


class _BeforeTensorFlow(importlib.abc.MetaPathFinder):
    """Loads Triton when TensorFlow is about to be loaded."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Find nothing; others do."""
        if fullname == "tensorflow" and self in sys.meta_path:
            sys.meta_path.remove(self)
            settle_triton(fullname)


def watch() -> None:
    """Load Triton before TensorFlow, whoever loads that; once."""
    loaded = {"tensorflow", "triton"} & sys.modules.keys()
    if not loaded and not any(isinstance(finder, _BeforeTensorFlow) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTensorFlow())
