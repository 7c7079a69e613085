"""The work of launching a call, counted instead of timed.

On a GPU a network of small layers takes the time the host needs to launch it, which does not depend on sizes: it is
Python's call, autograd's bookkeeping, and below that one dispatched operation after the other, each with its memory to
allocate and its kernel to launch. The operations are seen when a call is tried on fake tensors
(`outcore.cost.measured.live_bytes`), casts under autocast included, so they are counted there, weighted by what kind of
operation it is. The unit is one simple operation as `outcore machine` times it (`Device.dispatch_s`).

The weights were fitted to calls measured one by one on an H200 (AlexNet, ResNet-18, ViT-B and Swin-T; see
`benchmarks/step-prediction`), all at one speed of the host, at which a simple operation took 9 microseconds, and their
common factor to the steps of that benchmark.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from outcore.ops.registry import aten_kind

CALL = 0.63
"""The call of a module or function in Python."""
NODE = 1.27
"""A node of backward: taken from the queue, its gradients checked and passed on."""
BETWEEN = 0.87
"""What lies between two calls: modules around them, the user's Python, accumulated gradients."""
START = 8.0
"""Starting backward in a thread of its own."""

_VIEW, _KERNEL, _CAST, _PRODUCT = 0.23, 1.1, 1.8, 3.6
SUM = _KERNEL
"""Adding one gradient to another."""
_LIBRARY = {
    "convolution": 4.67,
    "convolution_backward": 9.33,
    "attention": 4.8,
    "attention_backward": 13.3,
    "batch_norm": 4.67,
    "batch_norm_backward": 4.0,
    "norm": 2.73,
    "norm_backward": 5.47,
}
"""Operations that look for an algorithm or launch several kernels, by a part of their name."""
_BIAS, _BIAS_BACKWARD = 2.67, 6.0
"""A convolution's bias: a kernel that adds it, one that sums its gradient, inside of the operation."""
_FREE = frozenset("device detach empty empty_like empty_strided alias lift_fresh sym_size sym_stride sym_numel".split())


def issue_of(operation: Any, args: Sequence[Any] = ()) -> float:
    """The work of launching one dispatched operation, in simple operations."""
    work = _work(operation)
    name = getattr(operation, "_opname", "")
    if name == "convolution" and len(args) > 2 and args[2] is not None:
        return work + _BIAS
    if name == "convolution_backward" and len(args) > 10 and args[10][2]:
        return work + _BIAS_BACKWARD
    return work


@functools.cache
def _work(operation: Any) -> float:
    name = str(getattr(operation, "_opname", operation))
    if name in _FREE:
        return 0.0
    kind = aten_kind(name)
    if kind == "view" or name == "unfold":
        return _VIEW
    if kind in ("matrix product", "linear"):
        return _PRODUCT
    for part in ("convolution", "attention", "batch_norm", "norm"):
        if part in name:
            return _LIBRARY[f"{part}_backward" if "backward" in name else part]
    return _CAST if name == "_to_copy" else _KERNEL
