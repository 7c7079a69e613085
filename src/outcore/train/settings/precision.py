"""The precision of a run, as one context: what is recorded and planned is what will be computed."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

__all__ = ["PRECISIONS", "computing"]

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What autocast computes in; fp32 needs none."""


def computing(precision: str, device: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast on a kind of device, where the precision asks for it."""
    dtype = PRECISIONS.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype)
