"""Bytes a GPU moves beside the operations themselves.

Six things cost time on a GPU that no description of a layer shows:

- *casts*: under autocast the weights of a matrix product are cast to the small type in forward and their gradients back
  in backward, and so is an input that is float32; norms, softmax and losses are computed in float32 instead, and
  their inputs are cast up (torch's lists of autocast operations for CUDA; those for the CPU differ, so a graph that was
  recorded on one says little about the other);
- *views*: taking a part of a tensor is free, but its gradient is a tensor of zeros with that part written into it;
- *foldings*: a matrix product of many dimensions is done as one of two or three; where the strides of an input do not
  allow that, as after a transposition of heads and positions, it is copied first, and a bias is added by itself;
- *rearranging copies*: rolling, padding and resizing cost in backward what they cost in forward, and rolling several
  dimensions is a slow copy for each;
- *spread operands*: one that is smaller than the result of a sum or product gets its gradient by a sum over all of it;
- *turned gradients*: one that arrives in another layout than its tensor's (`CallCost.arriving`) is copied by what
  cannot use it so: views, products, norms, convolutions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from outcore.cost.costs import Costs
from outcore.graph import Graph, Value
from outcore.graph.record.recording import Step
from outcore.ops.registry import Facet, names
from outcore.ops.traits import CAST_DOWN, CAST_UP, WITHOUT_WORK

_HALVES = ("bfloat16", "float16")
_CASTS = names("to", "type", "bfloat16", "half", "type_as")
_ROWS = names("linear", "transposed_linear")
_PRODUCTS = _ROWS | names("matmul")
_WHOLE = CAST_DOWN | names("layer_norm", "batch_norm", "group_norm")
"""Operations whose backward needs gradients without gaps, in one order."""


@dataclass(frozen=True, slots=True)
class GradientCopies:
    """What the backward of an operation copies beside its own work."""

    part: Literal["", "written into zeros", "joined"] = ""
    """The result is a part of the input: its gradient is written into one of zeros, or all parts are joined."""
    as_forward: bool = False
    """Backward copies as much as forward did."""
    spread: int = 0
    """Passes over the result by which a smaller operand, broadcast over it, gets its gradient: a sum, after a product
    that is written and read again."""


COPIES: Facet[GradientCopies] = Facet("gradient copies", "what its backward copies beside its own work")
COPIES.add(GradientCopies(part="written into zeros"), "getitem", "select", "narrow", "diagonal")
COPIES.add(GradientCopies(part="joined"), "unbind")
COPIES.add(GradientCopies(as_forward=True), "roll", "pad", "flip", "repeat", "interpolate")
COPIES.add(GradientCopies(spread=1), "add", "sub")
COPIES.add(GradientCopies(spread=4), "mul")


class MemoryTraffic:
    """Bytes that the calls of one graph move on a GPU beside their own work."""

    def __init__(self, graph: Graph, costs: Costs, steps: Mapping[str, Step]) -> None:
        self.graph, self.costs, self.steps = graph, costs, steps
        self._autocast = {name for name, step in steps.items() if any(on for _, on, _ in step.context.autocast)}
        self._wide = self._find_wide()

    def _find_wide(self) -> set[str]:
        """Values that are float32 on a GPU whatever they were recorded as.

        They come from what is promoted there, and go through everything that is neither promoted nor cast down: a
        residual stream behind a norm stays float32.
        """
        found: set[str] = set()
        for name, call in self.graph.calls.items():
            kind = self.graph.blocks[call.block].type
            if name not in self._autocast or kind in CAST_DOWN or kind in _CASTS:
                continue
            if kind in CAST_UP or any(v in found for v in call.inputs):
                found.update(v for v in call.outputs if self.graph.values[v].dtype in _HALVES)
        return found

    def promoted(self, name: str) -> bool:
        """Whether a call is computed in float32 although the types around it are smaller."""
        kind = self.graph.blocks[self.graph.calls[name].block].type
        return name in self._autocast and kind in CAST_UP

    def in_float32(self, name: str) -> bool:
        """Whether a call makes float32 on a GPU, although it may have been recorded otherwise."""
        return self.promoted(name) or any(v in self._wide for v in self.graph.calls[name].outputs)

    def bytes_of(self, name: str) -> tuple[int, int]:
        """Bytes moved in forward and in backward."""
        call, cost = self.graph.calls[name], self.costs.calls[name]
        kind = self.graph.blocks[call.block].type
        inputs = [self.graph.values[v] for v in call.inputs]
        both = bias = 0
        if name in self._autocast and kind in CAST_DOWN:  # there and back
            both += 6 * (cost.parameter_bytes // 4 + sum(_elements(v) for v in inputs if self._is_wide(v)))
        if kind in _PRODUCTS:
            copied = sum(2 * self._bytes(v) for v in inputs if not _folds(v, keep=1 if kind in _ROWS else 2))
            both += copied
            if copied and kind in _ROWS and len(call.parameters) > 1:
                bias = 2 * sum(self._bytes(self.graph.values[v]) for v in call.outputs)
        if kind in names("roll") and inputs:
            both += 2 * self._bytes(inputs[0]) * (2 * self._rolled(name) - 1)
        if self.promoted(name):
            both += 6 * sum(_elements(v) for v in inputs if v.dtype in _HALVES and not self._is_wide(v))
        if not cost.has_backward:
            return both + bias, 0
        return both + bias, both + self._copied(name, kind, inputs) + self._turned(name, kind)

    def _copied(self, name: str, kind: str, inputs: list[Value]) -> int:
        """Bytes by which backward writes gradients of parts, of what was rearranged, and of what was spread."""
        copies, outputs = COPIES.find(kind), self.graph.calls[name].outputs
        if copies is None or not outputs:
            return 0
        out, given = self._bytes(self.graph.values[outputs[0]]), sum(self._bytes(v) for v in inputs[:1])
        if copies.part:
            return (2 * given if copies.part == "joined" else given + 2 * out) if inputs else 0
        if copies.as_forward:
            return 2 * max(out, given)
        return copies.spread * out if self._spreads(name) else 0

    def _spreads(self, name: str) -> bool:
        """Whether an operand that has a gradient is smaller than the result."""
        call = self.graph.calls[name]
        result = _elements(self.graph.values[call.outputs[0]])
        operands = [self.graph.values[v] for v in call.inputs]
        return any(v.requires_grad and _elements(v) < result for v in operands) or (
            0 < self.costs.calls[name].parameter_bytes < 2 * result
        )

    def _rolled(self, name: str) -> int:
        """How many dimensions a roll moves along."""
        step = self.steps[name]
        dims = step.kwargs.get("dims", step.args[2] if len(step.args) > 2 else 0)
        return len(dims) if isinstance(dims, tuple | list) else 1

    def _turned(self, name: str, kind: str) -> int:
        """Bytes of copies of gradients that do not have the layout they are needed in."""
        cost = self.costs.calls[name]
        whole = [of for of, stride in cost.arriving.items() if 0 not in stride]
        known = COPIES.find(kind)
        if (known is not None and known.part) or not whole:
            return 0
        if kind in WITHOUT_WORK:
            return sum(2 * gradient.bytes for gradient in cost.gradients)
        return sum(2 * self._bytes(self.graph.values[of]) for of in whole) if kind in _WHOLE else 0

    def _is_wide(self, value: Value) -> bool:
        """Whether a value is float32 on a GPU: by its type, or because of what made it."""
        return value.dtype == "float32" or value.name in self._wide

    def _bytes(self, value: Value) -> int:
        """Bytes of a value as it is on a GPU."""
        return value.bytes * (2 if value.name in self._wide else 1)


def _elements(value: Value) -> int:
    return math.prod(value.shape)


def _folds(value: Value, *, keep: int) -> bool:
    """Whether all dimensions but the last `keep` can be seen as one without a copy."""
    shape, stride = value.shape, value.stride
    if len(stride) != len(shape) or len(shape) <= keep + 1:
        return True
    leading = [(n, step) for n, step in zip(shape[:-keep], stride[:-keep], strict=True) if n > 1]
    return all(a[1] == b[0] * b[1] for a, b in itertools.pairwise(leading))
