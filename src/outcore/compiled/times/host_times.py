"""What a compiled step takes on the host.

A GPU works on what the host has launched, and a compiled step of small kernels waits for the host: Inductor's code is
Python, which takes memory for every buffer, calls a generated kernel or a library's operation, and goes on. Python's
own time does not depend on sizes, so it is counted: launches, calls and buffers, each weighted by what it takes. The
unit is one simple operation as issued by hand (`outcore.machine.probe_cuda.measure_cuda_dispatch`), which is timed once
in a process, in milliseconds, and knows how fast this host is. The weights were fitted to steps of torch.compile and of
ours on an H200 (`benchmarks/within-compiled/predicted_times.py`).

Training loops do not wait for the device in every step, so the host is a step ahead wherever it is the faster one, and
a step takes the longer of the two. Where both take about the same time, each waits for the other now and then; and what
is computed once more is never quite free. Both are expressed by a norm instead of the maximum:

    (host^p + device^p)^(1/p), 1.09 times the maximum where both are equal, 1.0005 times where one is half of the other
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from outcore.cost.measured.launch_count import issue_of
from outcore.machine.probe_cuda import measure_cuda_dispatch
from outcore.ops.registry import aten_kind

__all__ = ["BUFFER", "ENTER", "LAUNCH", "PARAMETER", "WAY", "host_and_device_s", "library_work", "simple_operation_s"]

LAUNCH = 1.6
"""A generated kernel."""
BUFFER = 0.25
"""Memory that is taken, and given back."""
PARAMETER = 1.5
"""Of every parameter: guards, arguments of both graphs, its gradient, its part of the optimizer's step."""
ENTER = 60.0
"""Entering the compiled forward and backward: guards, wrappers, autograd's function, the thread of the backward."""
WAY = 16.0
"""Of a value that leaves: four operations that are written in Python, with their events."""
_PRODUCT, _SEARCHED, _LOWERED = 2.3, 1.28, 0.5
"""A matrix product; a convolution or attention, over the same in a module, which looks for an algorithm and launches
several kernels; what is no library's operation to Inductor, but a part of its kernels."""
_LEAST_SEARCHED = 4.0
"""The work of launching such an operation in a module is more than this."""
_NORM = 8
_TRIES = 3


@functools.cache
def simple_operation_s(device: torch.device) -> float:
    """Seconds that this host takes to issue a simple operation; undisturbed, as far as can be seen."""
    return min(measure_cuda_dispatch(device) for _ in range(_TRIES))


def library_work(target: Any) -> float:
    """The work of launching an operation of a library, in simple operations; biases of convolutions, and their
    gradients, are parts of generated kernels.

    Args:
        target: of a node.
    """
    if aten_kind(str(getattr(target, "_opname", ""))) in ("matrix product", "linear"):
        return _PRODUCT
    work = issue_of(target)
    return _SEARCHED * work if work > _LEAST_SEARCHED else _LOWERED


def host_and_device_s(host_s: float, device_s: float) -> float:
    """What a step takes.

    >>> round(host_and_device_s(1.0, 4.0), 3), round(host_and_device_s(2.0, 2.0), 2)
    (4.0, 2.18)
    """
    longer = max(host_s, device_s)
    if longer <= 0:
        return 0.0
    return float(longer * (1 + (min(host_s, device_s) / longer) ** _NORM) ** (1 / _NORM))
