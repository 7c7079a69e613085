"""What it takes to issue a call, counted instead of timed.

On a GPU a network of small layers takes the time the host needs to issue it, which does not depend on sizes: it is
Python's call, autograd's bookkeeping, and below that one dispatched operation after the other, each with its memory to
find and its kernel to launch. The operations are seen when a call is tried on fake tensors (`outcore.cost.live`), casts
under autocast included, so they are counted there, weighted by what kind of operation it is. The unit is one simple
operation as `outcore machine` times it (`Device.dispatch_s`).

The weights were fitted to the measured calls of networks on an H200 (`benchmarks/step-prediction`); the host's own
speed is in the unit.
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["BETWEEN", "CALL", "NODE", "START", "issue_of"]

CALL = 0.6
"""The call of a module or function in Python."""
NODE = 0.8
"""A node of backward: taken from the queue, its gradients checked and handed on."""
BETWEEN = 0.3
"""What lies between two calls: modules around them, the user's Python, accumulated gradients."""
START = 8.0
"""Starting backward in a thread of its own."""

_VIEW, _KERNEL, _CAST, _PRODUCT, _ATTENTION, _NORM, _CONVOLUTION, _CONVOLUTION_BACKWARD = (
    0.3,
    1.0,
    1.4,
    2.0,
    4.0,
    3.0,
    4.0,
    8.0,
)
_FREE = frozenset("device detach empty empty_like empty_strided alias lift_fresh sym_size sym_stride sym_numel".split())
_VIEWS = frozenset(
    "view _unsafe_view reshape t transpose permute slice select expand squeeze unsqueeze as_strided split "
    "split_with_sizes chunk unbind unfold diagonal view_as movedim".split()
)
_PRODUCTS = frozenset("mm addmm bmm baddbmm linear".split())


@functools.cache
def issue_of(operation: Any) -> float:
    """The work of issuing one dispatched operation, in simple operations."""
    name = str(getattr(operation, "_opname", operation))
    if name in _FREE:
        return 0.0
    if name in _VIEWS:
        return _VIEW
    if name in _PRODUCTS:
        return _PRODUCT
    if "convolution" in name:
        return _CONVOLUTION_BACKWARD if "backward" in name else _CONVOLUTION
    if "attention" in name:
        return _ATTENTION
    if "norm" in name:
        return _NORM
    return _CAST if name == "_to_copy" else _KERNEL
