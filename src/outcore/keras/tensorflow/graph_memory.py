"""What a step holds at its peak, from TensorFlow's own graph of it.

A traced function says what decides its memory: the operations, what each reads, and the size of every tensor.
TensorFlow's executor runs an operation when its inputs are there, first come first served, and frees a tensor after its
last reader. So the peak is found by doing just that, without running anything, with one thread and with two:

- an operation that only renames a tensor (identity, reshape) makes nothing new; reading a variable gives its buffer;
- an elementwise operation writes over an input that nothing else will read, as TensorFlow's kernels do;
- what the function is given, and what it returns, lives to its end;
- what is taken and freed goes through a simulation of TensorFlow's allocator (`bfc_allocator`), which rounds.

How much it rounds depends on where free memory lies, and so on all that the process did before: the same step was seen
to take 103 and 120 MiB. So a step is also replayed after some histories, drawn at random, in which values like its own
were alive while variables were made; the peak is the largest of all, the spread how far it is above that of a process
that did nothing before.

This is what `tf.config.experimental.get_memory_info` measures, on a CPU as on a GPU. Not in the prediction: most
scratch memory inside kernels, what loops of recurrent layers collect, and XLA, without which a planned step runs.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outcore.keras.tensorflow.bfc_allocator import BestFitAllocator

__all__ = ["GraphMemory", "buffers_of", "graph_memory", "tensor_bytes"]

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

_WORKERS = (1, 2)
"""Operations that run at once. TensorFlow has a thread per core, but few operations of a chain are ready together."""
_HISTORIES = 12
"""How many histories are drawn."""
_COLUMNS = {"Conv2DBackpropFilter": 0, "Conv2DBackpropInput": 2}
"""Convolutions whose backward, in float64, unfolds at least one image into columns; the input that says its size."""


@dataclass
class GraphMemory:
    """The peak of a step, with what stands throughout."""

    peak_bytes: int = 0
    spread_bytes: int = 0
    """How much of the peak is due to what the process did before."""
    at: str = ""
    """The operation at the peak."""
    unknown: list[str] = field(default_factory=list)
    """Operations whose outputs have no known size."""


def tensor_bytes(tensor: Any) -> int | None:
    """The size of a tensor, or none if it is not known; handles have none to speak of."""
    if tensor.dtype.name in ("resource", "variant", "string"):
        return 0
    shape = tensor.shape
    return math.prod(shape) * int(tensor.dtype.size) if shape.is_fully_defined() else None


def buffers_of(operations: list[Any]) -> dict[Any, Any]:
    """For every tensor, by its reference, that of the tensor whose memory it has."""
    owner: dict[Any, Any] = {}
    for op in operations:
        for place, tensor in enumerate(op.outputs):
            source = op.inputs[place] if op.type in _ALIASES and place < len(op.inputs) else None
            owner[tensor.ref()] = owner.get(source.ref(), source.ref()) if source is not None else tensor.ref()
    return owner


def graph_memory(graph: Any, standing: Sequence[int] = (), steps: int = 2) -> GraphMemory:
    """The peak of a traced function's graph, run some times.

    Args:
        graph: of a function.
        standing: sizes of what is there before and after: variables, inputs.
        steps: how often it runs; memory that one run frees is laid out otherwise for the next.
    """
    wanted = _reached(graph)
    run = _Run([op for op in graph.get_operations() if op in wanted], graph.outputs)
    found = GraphMemory(unknown=run.unknown)
    for workers in _WORKERS:
        allocator = BestFitAllocator()
        for size in standing:
            allocator.take(size)
        at = ""
        for _ in range(steps):
            at = run.replay(allocator, workers) or at
        if allocator.peak > found.peak_bytes:
            found.peak_bytes, found.at = allocator.peak, at
    fresh = found.peak_bytes
    for number in range(_HISTORIES):
        allocator = run.after_a_history(standing, fresh, random.Random(number))
        for _ in range(steps):
            run.replay(allocator, _WORKERS[number % len(_WORKERS)])
        found.peak_bytes = max(found.peak_bytes, allocator.peak)
    found.spread_bytes = found.peak_bytes - fresh
    return found


class _Run:
    """The operations of a graph in the order in which they run, with the memory each makes and frees."""

    def __init__(self, order: list[Any], outputs: list[Any]) -> None:
        self.owner = buffers_of(order)
        self.order = order
        self.size: dict[Any, int] = {}
        self.unknown: list[str] = []
        for op in order:
            for tensor in op.outputs:
                n = 0 if op.type in _NOTHING else tensor_bytes(tensor)
                if n is None:
                    self.unknown.append(f"{op.name} ({op.type})")
                self.size[tensor.ref()] = n or 0
        self.inputs = {op: {self._buffer(t) for t in op.inputs} for op in order}
        self.scratch = {op: _scratch(op) for op in order}
        self.readers: dict[Any, int] = {}
        self.returned = {self._buffer(t) for t in outputs}
        for op in order:
            for ref in self.inputs[op]:
                self.readers[ref] = self.readers.get(ref, 0) + 1
        for ref in self.returned:
            self.readers[ref] = self.readers.get(ref, 0) + 1  # the caller
        self.executed = {workers: list(_as_executed(order, workers)) for workers in _WORKERS}

    def _buffer(self, tensor: Any) -> Any:
        return self.owner.get(tensor.ref(), tensor.ref())

    def replay(self, allocator: BestFitAllocator, workers: int) -> str:
        """One run by so many threads; the operation at a new peak, if there was one."""
        readers, held, at = dict(self.readers), dict[Any, Any](), ""
        for together in self.executed[workers]:
            most, scratch = allocator.peak, []
            for op in together:
                self._allocate(op, readers, held, allocator)
                scratch.append(allocator.take(self.scratch[op]))
            if allocator.peak > most:
                at = f"{together[-1].name} ({together[-1].type})"
            for op, chunk in zip(together, scratch, strict=True):
                allocator.give(chunk)
                for ref in self.inputs[op]:
                    readers[ref] -= 1
                    if not readers[ref]:
                        allocator.give(held.pop(ref, None))
                for tensor in op.outputs:
                    if not readers.get(self.owner[tensor.ref()]):
                        allocator.give(held.pop(self.owner[tensor.ref()], None))
        for ref in list(held):
            allocator.give(held.pop(ref))
        return at

    def after_a_history(self, standing: Sequence[int], most_bytes: int, draw: random.Random) -> BestFitAllocator:
        """An allocator in which values like those of this graph were alive while what stands throughout was made."""
        allocator = BestFitAllocator()
        sizes = [size for size in self.size.values() if size]
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

    def _allocate(self, op: Any, readers: dict[Any, int], held: dict[Any, Any], allocator: BestFitAllocator) -> None:
        """Memory for the outputs of an operation, or that of an input that nothing else will read."""
        size, mine = self.size, set(self.inputs[op])
        for ref in [self.owner[t.ref()] for t in op.outputs] if op.type not in _ALIASES else []:
            same = next((r for r in mine if readers[r] == 1 and r in held and size[r] == size[ref]), None)
            if op.type in _IN_PLACE and same is not None:
                mine.discard(same)
                held[ref] = held.pop(same)
            else:
                held[ref] = allocator.take(size[ref])


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


def _as_executed(order: list[Any], workers: int) -> Iterator[list[Any]]:
    """The operations first come, first served, some at once: each is queued when the last of its inputs is made."""
    inside = set(order)
    waits: dict[Any, int] = {}
    followers: dict[Any, list[Any]] = {}
    for op in order:
        before = {t.op for t in op.inputs if t.op in inside} | {c for c in op.control_inputs if c in inside}
        waits[op] = len(before)
        for earlier in before:
            followers.setdefault(earlier, []).append(op)
    place = {op: number for number, op in enumerate(order)}
    ready = deque(op for op in order if not waits[op])
    while ready:
        together = [ready.popleft() for _ in range(min(workers, len(ready)))]
        yield together
        for later in sorted((f for op in together for f in followers.get(op, ())), key=place.__getitem__):
            waits[later] -= 1
            if not waits[later]:
                ready.append(later)


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
            peaks.append(graph_memory(graph).peak_bytes)
    return max(peaks)
