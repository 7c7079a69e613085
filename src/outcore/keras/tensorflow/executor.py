"""The order in which TensorFlow's executor runs the operations of a graph, simulated.

An operation is queued when the last of its inputs is made, and a free thread takes what was queued first. An operation
holds its inputs until it is done. That matters with several threads: while one computes the gradient of a large kernel,
another goes on with gradients of values, so the kernel's input lives longer than in any order on one thread. How long
operations take is estimated from their work; how long they really take is not known, so times can be drawn at random,
for every kind of operation and for every operation.
"""

from __future__ import annotations

import heapq
import math
import os
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

__all__ = ["Executor", "tensor_bytes", "threads", "work_of"]

_MOST_THREADS = 4
"""More are not simulated: few operations of a training step are ready together."""
_KINDS, _EACH = 2.0, 0.7
"""How far drawn times are from the estimate, as natural logarithms: by kind of operation, and for each beside that."""
_INTERRUPTED, _PAUSE = 0.05, 20.0
"""How often a thread has to wait for a core in the midst of an operation, and how much longer that takes then."""
_FILTER = 10.0
"""How much longer gradients of kernels take than their products: 16 ms were seen beside 1 ms for the ReLU in front."""


def tensor_bytes(tensor: Any) -> int | None:
    """The size of a tensor, or none if it is not known; handles have none to speak of."""
    if tensor.dtype.name in ("resource", "variant", "string"):
        return 0
    shape = tensor.shape
    return math.prod(shape) * int(tensor.dtype.size) if shape.is_fully_defined() else None


def threads(tf: Any) -> int:
    """How many operations TensorFlow runs at once here."""
    return min(_MOST_THREADS, tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1)


def work_of(op: Any) -> float:
    """Multiplications of convolutions and products, and the bytes that everything writes."""
    moved = float(sum(tensor_bytes(t) or 0 for t in op.outputs))
    if not op.outputs or not op.outputs[0].shape.is_fully_defined():
        return moved
    out = float(math.prod(op.outputs[0].shape))
    if "BackpropFilter" in op.type and len(op.inputs) > 2:
        gradient = op.inputs[2].shape  # one product for each of its elements and each of the kernel's, but its width
        known = gradient.is_fully_defined() and op.outputs[0].shape.rank
        return moved + (out * float(math.prod(gradient)) / max(1, op.outputs[0].shape[-1]) if known else 0.0)
    if op.type.startswith(("Conv", "Depthwise")) and len(op.inputs) > 1 and op.inputs[1].shape.is_fully_defined():
        kernel = op.inputs[1].shape
        if kernel.rank:
            shared = kernel[-1] * (kernel[-2] if "Depthwise" in op.type else 1)
            return moved + out * float(math.prod(kernel) / max(1, shared))
    if "MatMul" in op.type and op.inputs[0].shape.rank:
        return moved + out * float(op.inputs[0].shape[-1] or 1)
    return moved


def _time(op: Any) -> float:
    """An estimate to compare operations by; what the executor itself takes is not nothing."""
    return 1e4 + work_of(op) * (_FILTER if "BackpropFilter" in op.type else 1.0)


class Executor:
    """Runs operations, which are known by their places in a list, by some threads."""

    def __init__(self, order: list[Any]) -> None:
        place = {op: number for number, op in enumerate(order)}
        self._waits: list[int] = []
        self._followers: list[list[int]] = [[] for _ in order]
        for number, op in enumerate(order):
            before = {place[x] for x in (*(t.op for t in op.inputs), *op.control_inputs) if x in place}
            self._waits.append(len(before))
            for earlier in before:
                self._followers[earlier].append(number)
        self._time = [_time(op) for op in order]
        self._kind = [op.type for op in order]

    def run(self, workers: int, draw: random.Random | None = None) -> Iterator[tuple[int, bool]]:
        """Operations with whether they begin or end, in the order of time; times are drawn where that is asked for."""
        waits, ready = list(self._waits), deque(op for op, count in enumerate(self._waits) if not count)
        kinds: dict[str, float] = {}
        running: list[tuple[float, int]] = []
        now = 0.0
        while ready or running:
            while ready and len(running) < workers:
                op = ready.popleft()
                yield op, True
                time = self._time[op]
                if draw is not None:
                    kind = self._kind[op]
                    if kind not in kinds:
                        kinds[kind] = draw.uniform(-_KINDS, _KINDS)
                    time *= math.exp(kinds[kind] + draw.uniform(-_EACH, _EACH))
                    time *= _PAUSE if draw.random() < _INTERRUPTED else 1.0
                heapq.heappush(running, (now + time, op))
            now, op = heapq.heappop(running)
            yield op, False
            for later in self._followers[op]:
                waits[later] -= 1
                if not waits[later]:
                    ready.append(later)
