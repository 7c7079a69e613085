"""What a step holds at its peak, from TensorFlow's own graph of it.

A traced function says what decides its memory: the operations, what each reads, and the size of every tensor.
TensorFlow's executor runs an operation when its inputs are there, first come first served, and frees a tensor after its
last reader. So the peak is found by doing just that, without running anything (`executor`):

- an operation that only renames a tensor (identity, reshape) makes nothing new; reading a variable gives its buffer;
- an elementwise operation writes over an input that nothing else will read, as TensorFlow's kernels do;
- what the function is given, and what it returns, lives to its end;
- what is taken and freed goes through a simulation of TensorFlow's allocator (`bfc_allocator`), which rounds.

How much it rounds depends on where free memory lies, and so on all that the process did before: the same step was seen
to take 103 and 120 MiB. And how long values live depends on how long operations take on their threads: of 30 steps in a
row, the tensors of one took 13 MiB and of another 20. So a step is also replayed after some histories, drawn at random,
in which values like its own were alive while variables were made, with times that are drawn too; the peak is the
largest of all.

This is what `tf.config.experimental.get_memory_info` measures, on a CPU as on a GPU. Not in the prediction: most
scratch memory inside kernels, what loops of recurrent layers collect, and XLA, without which a planned step runs.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outcore.keras.tensorflow.bfc_allocator import BestFitAllocator
from outcore.keras.tensorflow.executor import Executor, tensor_bytes

__all__ = ["GraphMemory", "buffers_of", "graph_memory"]

_ALIASES = {
    "Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "EnsureShape",
    "Snapshot", "CheckNumerics",
}  # fmt: skip
_NOTHING = {"ReadVariableOp", "Placeholder", "Const", "VarHandleOp", "Shape", "ShapeN", "Rank", "Size"}
"""Their memory is that of a variable, of the caller, or next to none."""
_IN_PLACE = {
    "Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Sigmoid", "Tanh", "Softplus", "Softsign", "Exp", "Log", "Sqrt",
    "Rsqrt", "Square", "Neg", "Abs", "Erf", "Add", "AddV2", "AddN", "Sub", "Mul", "RealDiv", "Maximum", "Minimum",
    "BiasAdd", "ReluGrad", "Relu6Grad", "LeakyReluGrad", "EluGrad", "SeluGrad", "SigmoidGrad", "TanhGrad",
    "SoftplusGrad", "FusedBatchNormV3", "FusedBatchNormGradV3", "Softmax", "LogSoftmax", "MulNoNan", "DivNoNan", "Pow",
    "SquaredDifference",
}  # fmt: skip

_HISTORIES = 60
"""How many histories are drawn."""
_COLUMNS = {"Conv2DBackpropFilter": 0, "Conv2DBackpropInput": 2}
"""Convolutions whose backward, in float64, unfolds at least one image into columns; the input that says its size."""


@dataclass
class GraphMemory:
    """The peak of a step, with what stands throughout."""

    peak_bytes: int = 0
    spread_bytes: int = 0
    """How far the peak is above that of half of all histories."""
    at: str = ""
    """The operation at the peak."""
    unknown: list[str] = field(default_factory=list)
    """Operations whose outputs have no known size."""


def buffers_of(operations: list[Any]) -> dict[Any, Any]:
    """For every tensor, by its reference, that of the tensor whose memory it has."""
    owner: dict[Any, Any] = {}
    for op in operations:
        for place, tensor in enumerate(op.outputs):
            source = op.inputs[place] if op.type in _ALIASES and place < len(op.inputs) else None
            owner[tensor.ref()] = owner.get(source.ref(), source.ref()) if source is not None else tensor.ref()
    return owner


def graph_memory(
    graph: Any, standing: Sequence[int] = (), steps: int = 2, workers: int = 2, limit_bytes: float = math.inf
) -> GraphMemory:
    """The peak of a traced function's graph, run some times.

    Args:
        graph: of a function.
        standing: sizes of what is there before and after: variables, inputs.
        steps: how often it runs; memory that one run frees is laid out otherwise for the next.
        workers: operations that may run at once.
        limit_bytes: a peak above it need not be known well: no more histories are drawn.
    """
    wanted = _reached(graph)
    run = _Run([op for op in graph.get_operations() if op in wanted], graph.outputs)
    found = GraphMemory(unknown=run.unknown)
    for number in range(1, workers + 1):
        allocator, events, at = BestFitAllocator(), list(run.executor.run(number)), ""
        for size in standing:
            allocator.take(size)
        for _ in range(steps):
            at = run.replay(allocator, events) or at
        if allocator.peak > found.peak_bytes:
            found.peak_bytes, found.at = allocator.peak, at
    fresh, peaks = found.peak_bytes, list[int]()
    for number in range(_HISTORIES):
        if max(fresh, *peaks, 0) > limit_bytes:
            break
        draw = random.Random(number)
        allocator = run.after_a_history(standing, fresh, draw)
        for _ in range(steps):
            run.replay(allocator, run.executor.run(workers if number % 4 else 1, draw))
        peaks.append(allocator.peak)
    found.peak_bytes = max(fresh, *peaks) if peaks else fresh
    found.spread_bytes = found.peak_bytes - int(statistics.median(peaks or [fresh]))
    return found


class _Run:
    """The operations of a graph, by number, with the numbered buffers that each makes and reads."""

    def __init__(self, order: list[Any], outputs: list[Any]) -> None:
        self.executor = Executor(order)
        self.names = [f"{op.name} ({op.type})" for op in order]
        self.scratch = [_scratch(op) for op in order]
        self.unknown: list[str] = []
        owner = buffers_of(order)
        numbers: dict[Any, int] = {}
        self.size: list[int] = []

        def buffer(tensor: Any) -> int:
            ref = tensor.ref()
            ref = owner.get(ref, ref)
            if ref not in numbers:
                numbers[ref] = len(self.size)
                self.size.append(0)
            return numbers[ref]

        self.made: list[list[int]] = []
        """Buffers of outputs, where they are not those of inputs."""
        self.outputs: list[list[int]] = []
        self.inputs: list[list[int]] = []
        self.in_place: list[bool] = []
        for op, name in zip(order, self.names, strict=True):
            found = [buffer(t) for t in op.outputs]
            for number, tensor in zip(found, op.outputs, strict=True):
                n = 0 if op.type in _NOTHING else tensor_bytes(tensor)
                if n is None:
                    self.unknown.append(name)
                if op.type not in _ALIASES:
                    self.size[number] = n or 0
            self.outputs.append(found)
            self.made.append([] if op.type in _ALIASES else found)
            self.inputs.append(list(dict.fromkeys(buffer(t) for t in op.inputs)))
            self.in_place.append(op.type in _IN_PLACE)
        returned = {buffer(t) for t in outputs}
        self.readers = [0] * len(self.size)
        for number in (*(n for read in self.inputs for n in read), *returned):
            self.readers[number] += 1  # the caller reads what is returned

    def replay(self, allocator: BestFitAllocator, events: Iterable[tuple[int, bool]]) -> str:
        """One run, by what begins and ends; the operation at a new peak, if there was one."""
        readers, held, at = list(self.readers), dict[int, Any](), -1
        scratch: dict[int, Any] = {}
        for op, begins in events:
            if begins:
                most = allocator.peak
                self._allocate(op, readers, held, allocator)
                if self.scratch[op]:
                    scratch[op] = allocator.take(self.scratch[op])
                if allocator.peak > most:
                    at = op
                continue
            if op in scratch:
                allocator.give(scratch.pop(op))
            for number in self.inputs[op]:
                readers[number] -= 1
                if not readers[number]:
                    allocator.give(held.pop(number, None))
            for number in self.outputs[op]:
                if not readers[number]:
                    allocator.give(held.pop(number, None))
        for chunk in held.values():
            allocator.give(chunk)
        return self.names[at] if at >= 0 else ""

    def after_a_history(self, standing: Sequence[int], most_bytes: int, draw: random.Random) -> BestFitAllocator:
        """An allocator in which values like those of this graph were alive while what stands throughout was made."""
        allocator = BestFitAllocator()
        sizes = [size for size in self.size if size]
        passing, left = list[int](), most_bytes * draw.uniform(0.3, 1.5)
        while sizes and left > 0:
            passing.append(draw.choice(sizes))
            left -= max(passing[-1], most_bytes / 1000)
        order = [*((size, True) for size in standing), *((size, False) for size in passing)]
        draw.shuffle(order)
        held = [(allocator.take(size), stays) for size, stays in order]
        for chunk, stays in held:
            if not stays:
                allocator.give(chunk)
        allocator.peak = allocator.in_use
        return allocator

    def _allocate(self, op: int, readers: list[int], held: dict[int, Any], allocator: BestFitAllocator) -> None:
        """Memory for the outputs of an operation, or that of an input that nothing else will read."""
        mine = self.inputs[op] if self.in_place[op] else []
        for number in self.made[op]:
            size = self.size[number]
            same = next((n for n in mine if readers[n] == 1 and n in held and self.size[n] == size), None)
            held[number] = allocator.take(size) if same is None else held.pop(same)


def _scratch(op: Any) -> int:
    """What a kernel takes beside its outputs."""
    inner = _inner_peak(op)
    if op.type == "MaxPoolGrad" and op.inputs[1].shape.is_fully_defined():  # the pool again, and where its maxima are
        return inner + int(math.prod(op.inputs[1].shape)) * (8 + int(op.inputs[1].dtype.size))
    if op.type in _COLUMNS and op.outputs[0].dtype.name == "float64" and len(op.inputs) > 2:
        image = op.inputs[_COLUMNS[op.type]].shape
        kernel = op.outputs[0].shape if op.type == "Conv2DBackpropFilter" else op.inputs[1].shape
        gradient = op.inputs[2].shape
        if all(shape.is_fully_defined() for shape in (image, kernel, gradient)):
            return inner + int(math.prod(gradient[1:3]) * math.prod(kernel[:3])) * 8
    return inner


def _reached(graph: Any) -> set[Any]:
    """The operations that run: those that lead to an output or have an effect."""
    stack = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
    seen: set[Any] = set()
    while stack:
        op = stack.pop()
        if op not in seen:
            seen.add(op)
            stack += [tensor.op for tensor in op.inputs]
            stack += op.control_inputs
    return seen


def _inner_peak(op: Any) -> int:
    """What a function that an operation calls (a loop, a branch, a call) holds inside, at most."""
    peaks = [0]
    for name in ("f", "body", "then_branch", "else_branch"):
        try:
            called = op.get_attr(name)
        except ValueError:
            continue
        graph = getattr(op.graph._functions.get(called.name, None), "graph", None) if hasattr(called, "name") else None
        if graph is not None:
            peaks.append(graph_memory(graph, limit_bytes=0).peak_bytes)  # histories are drawn for what is around it
    return max(peaks)
