"""Finds residual blocks that end in a scaled branch, by going back from every sum.

    branch ── * parameter per channel ── * number per image, if any ── + residual
                     └──────────── views in between are allowed ────────┘

Nothing else may read the values in between, and no hook of the user's may look at them. The channels of a pixel must be
contiguous, which is the dimension of the parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from outcore.graph import Graph
from outcore.graph.parts import Value
from outcore.graph.record.recording import Ref, Step
from outcore.memory.op_fusion.pattern import ReaderPatterns
from outcore.memory.op_fusion.rewrite import written_later
from outcore.ops.registry import names, operation

_SUMS = names("add")
_PRODUCTS = operation("mul").functions
_VIEWS = names("permute", "transpose", "movedim")
_FLOATS = {"float64", "float32", "float16", "bfloat16"}


@dataclass(frozen=True)
class ScaledBranch:
    """A sum with the products before it."""

    call: str
    """The sum."""
    branch: str
    """The value that it adds to the residual."""
    residual: str
    scale: str
    """The parameter."""
    dim: int
    """The dimension of the branch along which the parameter goes."""
    products: tuple[str, ...]
    """The calls that multiply, the one by the parameter first."""
    between: tuple[str, ...]
    """The values from the first product to the sum."""
    input: str
    """What the first product reads."""
    noise: str | None = None
    """The random number per image."""
    reader: str = ""
    """A layer that would cast the sum, which is then written in that type too; empty if there is none."""
    copy: str = ""
    """The copy that the reader saves."""
    copy_kind: str = ""

    @property
    def gone(self) -> frozenset[str]:
        """Buffers that are no longer made, or begin with another value."""
        return frozenset(self.between)


def scaled_branches(graph: Graph, model: nn.Module) -> dict[str, ScaledBranch]:
    """The scaled branches of a network, by the call of the sum."""
    walk, found = _Walk(graph, model), {}
    for name, call in graph.calls.items():
        if graph.blocks[call.block].type in _SUMS and len(call.outputs) == 1 and call.grad:
            row = walk.back(name, 0) or walk.back(name, 1)
            if row is not None:
                found[name] = row
    return found


class _Walk:
    """Goes back from a sum to the parameter that scales one of its operands."""

    def __init__(self, graph: Graph, model: nn.Module) -> None:
        self.graph, self.after = graph, ReaderPatterns(graph, model)

    def back(self, call: str, side: int) -> ScaledBranch | None:
        """The products before a sum, if its first or second operand is a scaled branch."""
        pair = _operands(self.after.steps[call])
        if pair is None or not self.alike(call, pair[side], pair[1 - side]):
            return None
        branch, residual = pair[side], pair[1 - side]
        products: list[str] = []
        between: list[str] = []
        noise, value, following = None, branch, call
        while True:
            maker = self.graph.values[value].producer
            if maker is None or self.after.readers(value) != [following] or value in self.graph.outputs:
                return None
            between.insert(0, value)
            following, step = maker, self.after.steps[maker]
            kind = self.graph.blocks[self.graph.calls[maker].block].type
            if kind in _VIEWS and len(self.graph.calls[maker].inputs) == 1:
                (value,) = self.graph.calls[maker].inputs
                continue
            if kind not in _PRODUCTS or step.kind != "function" or step.kwargs or len(step.args) != 2:
                return None
            products.insert(0, maker)
            if (scale := self.scale(step, value, branch)) is not None:
                name, dim, given = scale
                late = noise is not None and written_later(self.graph, noise, products[-1])
                row = ScaledBranch(call, branch, residual, name, dim, tuple(products), tuple(between), given, noise)
                return None if late or written_later(self.graph, given, maker) else row
            operands = _operands(step)
            if noise is not None or operands is None or not any(drawn := [self.drawn(v, value) for v in operands]):
                return None
            noise = operands[drawn.index(True)]
            value = operands[1 - drawn.index(True)]

    def alike(self, call: str, branch: str, residual: str) -> bool:
        """Whether both operands have the same layout and separate memory, and the sum overwrites nothing but the
        branch."""
        values = self.graph.values
        a, b, out = (values[v] for v in (branch, residual, self.graph.calls[call].outputs[0]))
        same = a.shape == b.shape == out.shape and a.stride == b.stride == out.stride and b.dtype in _FLOATS
        over = all(values[v].base == a.base for v in self.graph.calls[call].mutates)
        return same and over and a.base != b.base

    def scale(self, step: Step, out: str, branch: str) -> tuple[str, int, str] | None:
        """The parameter, its dimension in the branch and what it multiplies, if a product is by a parameter per
        channel."""
        refs = sorted((a for a in step.args if isinstance(a, Ref)), key=lambda ref: ref.kind)
        if [ref.kind for ref in refs] != ["state", "value"]:
            return None
        state, given = refs
        x, made, shape = self.graph.values[given.name], self.graph.values[out], self.shape(state.name)
        if shape is None or (x.shape, x.stride) != (made.shape, made.stride) or x.dtype not in _FLOATS:
            return None
        places = [len(x.shape) - len(shape) + i for i, size in enumerate(shape) if size > 1]
        inner = _innermost(self.graph.values[branch])
        if len(places) != 1 or places != _innermost(x) or len(inner) != 1:
            return None
        return state.name, inner[0], given.name

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a parameter in floating point."""
        found: Any = self.after.model
        for part in name.split("."):
            found = getattr(found, part, None)
        return tuple(found.shape) if isinstance(found, nn.Parameter) and found.is_floating_point() else None

    def drawn(self, name: str, product: str) -> bool:
        """Whether a value is one number per image, or a single one."""
        value, out = self.graph.values[name], self.graph.values[product]
        if value.requires_grad or value.dtype not in _FLOATS or len(value.shape) != len(out.shape):
            return False
        count, outermost = math.prod(value.shape), out.stride[0] * out.shape[0] == math.prod(out.shape)
        return count == 1 or (count == value.shape[0] == out.shape[0] and outermost)


def _operands(step: Step) -> tuple[str, str] | None:
    """The two values that a step takes, if it takes nothing else."""
    refs = [a for a in step.args if isinstance(a, Ref) and a.kind == "value"]
    if step.kind != "function" or len(step.args) != 2 or len(refs) != 2 or step.kwargs:
        return None
    return refs[0].name, refs[1].name


def _innermost(value: Value) -> list[int]:
    """The dimension whose elements are contiguous."""
    return [i for i, size in enumerate(value.shape) if size > 1 and value.stride[i] == 1]
