"""A recorded network as nodes that can be computed region by region.

Each output of each recorded call becomes a node with a rule, or with the reason why it has none. Along the way every
value learns which of its dimensions are *streamed*: the pixels of the inputs, wherever rules carry them. A value with
none is *global*: small, computed once, and whole in every tile.

A node is one of four kinds:

    local       has a rule: any region of it comes from regions of its operands
    reduction   needs all of a streamed operand, but as a sum over tiles; its output is global
    global      has no streamed operand: runs as it was recorded, once
    opaque      needs all of a streamed operand at once; streaming must stop before it, and `reason` says why

Which dimensions of an input are its pixels is found first (`pixel_dims`). In torch an image is (batch, channels,
pixels...). A model that takes it with channels last, as all Keras models do, or in any other order, permutes it before
the first layer that knows of pixels: a convolution, a pool, a norm over channels, a resampling. So the input's
dimensions are followed through permutations and operations that keep the number of dimensions, up to the first such
layer; those that arrive in its last places are the pixels. An input that reaches none, or whose samples have moved, is
taken to have channels first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import nn

import outcore.stream.rules  # noqa: F401 - registers the rules
from outcore.graph import Graph
from outcore.graph.naming import function_name
from outcore.graph.record.recording import Ref, Step
from outcore.graph.structure import leaves, substitute
from outcore.ops.registry import find
from outcore.stream.call import NotStreamable, Reduction, RegionRule, StreamCall, rule
from outcore.stream.rules.normalise import Norm

Kind = Literal["local", "reduction", "global", "opaque"]
Axes = tuple[int | None, ...]
"""Per dimension of a value, which streamed axis it is."""


@dataclass(frozen=True)
class RegionNode:
    """One value and how it is made."""

    output: str
    call: str
    kind: Kind
    operands: tuple[Ref, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    rule: RegionRule | None = None
    reduction: Reduction | None = None
    norm: Norm | None = None
    """The batch norm that a reduction's statistics belong to."""
    function: Callable[..., torch.Tensor] | None = None
    """What a global node computes, where it is not the recorded call."""
    absorbed: tuple[str, ...] = ()
    """Calls that are part of this node, beside its own."""
    reason: str = ""

    @property
    def values(self) -> tuple[str, ...]:
        """The graph's values among its operands."""
        return tuple(r.name for r in self.operands if r.kind == "value")


class RegionNetwork:
    """All nodes of a recording, in order; images are (batch, channels, pixels...), or as `layouts` finds them to be."""

    def __init__(self, graph: Graph, *, layouts: bool = False) -> None:
        module, recording = graph._running()
        self.graph, self.model, self.recording = graph, module.model, recording
        self.axes: dict[str, Axes] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.nodes: dict[str, RegionNode] = {}
        self.contexts = {s.name: s.context for s in recording.steps if s.context != recording.ambient}
        """Modes that the model itself puts some calls under."""
        self.rank = max((len(graph.values[name].shape) - 2 for name in graph.inputs), default=0)
        """The number of pixel dimensions."""
        pixels = pixel_dims(graph, recording.steps, self._operation) if layouts else {}
        for name in graph.inputs:
            value = graph.values[name]
            self._know(name, value.shape, _dtype(value.dtype), _pixels(value.shape, self.rank, pixels.get(name)))
        order = {name: i for i, name in enumerate(graph.calls)}
        for step in recording.steps:
            if step.kind == "guard":
                continue
            for index, output in enumerate((*step.outputs, *(new for new, _ in step.rebinds))):
                for node in self._nodes(step, index, output, order):
                    self.nodes[node.output] = node

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that are images."""
        return tuple(n for n in self.graph.inputs if self.is_streamed(n))

    def is_streamed(self, value: str) -> bool:
        """Whether tiles run along some dimension of it."""
        return any(a is not None for a in self.axes[value])

    def pixels(self, value: str) -> int:
        """How many pixels it has."""
        return math.prod(n for n, a in zip(self.shapes[value], self.axes[value], strict=True) if a is not None)

    def block_of(self, value: str) -> str:
        """The block that makes a value."""
        call = self.graph.calls[self.nodes[value].call]
        return call.block or "the model"

    def closure(self, values: Iterable[str], stop: Iterable[str] = ()) -> list[RegionNode]:
        """The nodes that compute some values, in order, not going beyond the values in `stop`."""
        wanted, stopped = set(values) - set(stop), set(stop)
        found = []
        for node in reversed(self.nodes.values()):
            if node.output in wanted:
                found.append(node)
                wanted.update(set(node.values) - stopped)
        return found[::-1]

    def state(self, ref: Ref) -> torch.Tensor:
        """A parameter, buffer or constant."""
        if ref.kind == "constant":
            return self.recording.constants[ref.name]
        tensor: torch.Tensor = attrgetter(ref.name)(self.model)
        return tensor

    # Binding

    def _know(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, axes: Axes) -> None:
        self.shapes[name], self.dtypes[name] = shape, dtype
        self.axes[name] = tuple(a if n > 1 else None for a, n in zip(axes, shape, strict=True))

    def _shape(self, ref: Ref) -> tuple[int, ...]:
        return self.shapes[ref.name] if ref.kind == "value" else tuple(self.state(ref).shape)

    def _streamed_dims(self, ref: Ref) -> frozenset[int]:
        axes = self.axes[ref.name] if ref.kind == "value" else ()
        return frozenset(d for d, a in enumerate(axes) if a is not None)

    def _maker(self, ref: Ref) -> RegionRule | None:
        return self.nodes[ref.name].rule if ref.kind == "value" and ref.name in self.nodes else None

    def _nodes(self, step: Step, index: int, output: str, order: Mapping[str, int]) -> list[RegionNode]:
        value = self.graph.values[output]
        shape, dtype = value.shape, _dtype(value.dtype)
        refs = tuple(r for _, r in leaves((step.args, step.kwargs), Ref) if r.kind != "module")
        images = [r for r in refs if r.kind == "value" and self.is_streamed(r.name)]
        blank: Axes = (None,) * len(shape)
        if not images:
            self._know(output, shape, dtype, blank)
            return [RegionNode(output, step.name, "global", refs, shape, dtype)]
        try:
            self._refuse_hazards(step, index, order)
            call = self._call(step, index, output)
            bound: Any = _bind(call)
            if isinstance(bound, Norm):
                return self._norm(bound, call)
            if hasattr(bound, "share"):
                self._know(output, shape, dtype, blank)
                return [RegionNode(output, step.name, "reduction", bound.operands, shape, dtype, reduction=bound)]
            self._know(output, shape, dtype, self._carried(bound, len(shape)))
            return [RegionNode(output, step.name, "local", bound.operands, shape, dtype, rule=bound)]
        except NotStreamable as why:
            # What lies behind an opaque node is never streamed, whatever its dimensions.
            self._know(output, shape, dtype, _pixels(shape, self.rank))
            return [RegionNode(output, step.name, "opaque", refs, shape, dtype, reason=str(why))]

    def _norm(self, norm: Norm, call: StreamCall) -> list[RegionNode]:
        statistics = f"{call.name}:moments"
        wide = torch.float64 if call.dtype == torch.float64 else torch.float32
        self._know(statistics, norm.apply.shapes[1], wide, (None,) * 3)
        self._know(call.output, call.shape, call.dtype, self._carried(norm.apply, len(call.shape)))
        moments = norm.moments
        first = RegionNode(
            statistics,
            call.name,
            "reduction",
            moments.operands,
            norm.apply.shapes[1],
            wide,
            reduction=moments,
            norm=norm,
        )
        return [
            first,
            RegionNode(call.output, call.name, "local", norm.operands, call.shape, call.dtype, rule=norm.apply),
        ]

    def _operation(self, step: Step) -> str:
        """The class of torch.nn, or the name of the function."""
        return _type(attrgetter(step.target)(self.model)) if step.kind == "module" else function_name(step.target)

    def _call(self, step: Step, index: int, output: str) -> StreamCall:
        module = attrgetter(step.target)(self.model) if step.kind == "module" else None
        value = self.graph.values[output]
        outputs = [self.graph.values[o].shape for o in step.outputs]
        differ = next((d for d in range(len(value.shape)) if len({o[d : d + 1] for o in outputs}) > 1), None)
        if differ is None and len(outputs) > 1:
            source = self._shape(next(r for _, r in leaves(step.args, Ref)))
            differ = next((d for d, n in enumerate(value.shape) if d < len(source) and source[d] != n), 0)
        return StreamCall(
            name=step.name,
            type=self._operation(step),
            path=step.target if module is not None else "",
            module=module,
            target=step.target,
            args=step.args,
            kwargs=step.kwargs,
            output=output,
            index=index,
            lengths=tuple(o[differ] for o in outputs) if differ is not None else (),
            shape=value.shape,
            dtype=_dtype(value.dtype),
            shapes=self._shape,
            streamed=self._streamed_dims,
            maker=self._maker,
        )

    def _carried(self, rule: RegionRule, rank: int) -> Axes:
        """The axes of the output's dimensions; every streamed dimension of an operand must become one."""
        axes: list[int | None] = [None] * rank
        for i, ref in enumerate(rule.operands):
            if ref.kind != "value":
                continue
            for dim, axis in enumerate(self.axes[ref.name]):
                if axis is None:
                    continue
                to = rule.follow(i, dim)
                if to is None or axes[to] not in (None, axis):
                    raise NotStreamable(f"it needs all of dimension {dim} of {ref.name} at once")
                axes[to] = axis
        return tuple(axes)

    def _refuse_hazards(self, step: Step, index: int, order: Mapping[str, int]) -> None:
        if index >= len(step.outputs):
            raise NotStreamable("it writes into a tensor that it does not return")
        call = self.graph.calls[step.name]
        for written in call.mutates:
            base = self.graph.values[written].base
            for value in self.graph.values.values():
                shares = value.base == base and value.name not in (written, *step.outputs)
                before = value.producer is None or order[value.producer] < order[step.name]
                if shares and before and any(order[c] > order[step.name] for c in value.consumers):
                    raise NotStreamable(f"it writes into the memory of {value.name}, which is read afterwards")


def _bind(call: StreamCall) -> Any:
    if call.module is not None:
        m = call.module
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            raise NotStreamable("it has hooks, which would see tiles")
        if nn.utils.parametrize.is_parametrized(m):
            raise NotStreamable("its parameters are parametrised")
    if (bind := rule.find(call.type)) is None:
        raise NotStreamable(f"{call.type} has no rule for parts of an image")
    return bind(call)


def _type(module: nn.Module) -> str:
    """The class of torch.nn that a module is, or is derived from."""
    for cls in type(module).__mro__:
        if rule.find(cls.__name__) is not None and getattr(cls, "forward", None) is type(module).forward:
            return cls.__name__
    return type(module).__name__


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _pixels(shape: tuple[int, ...], rank: int, dims: tuple[int, ...] | None = None) -> Axes:
    """The axes of the pixels, which are all dimensions after the second if it is not said, counted so that the last is
    the last axis."""
    pixels = range(2, len(shape)) if dims is None else dims
    return tuple(pixels.index(d) - len(pixels) + rank if d in pixels else None for d in range(len(shape)))


_BY_PIXEL = {
    "convolution", "transposed convolution", "norm with statistics", "average pool", "max pool",
    "adaptive average pool", "adaptive max pool", "unpool", "resampling",
}  # fmt: skip


def pixel_dims(graph: Graph, steps: Iterable[Step], name_of: Callable[[Step], str]) -> dict[str, tuple[int, ...]]:
    """The pixel dimensions of each input, in the order in which layers see them.

    Args:
        graph: of the model.
        steps: of its recording.
        name_of: the operation of a step.
    """
    found: dict[str, tuple[int, ...]] = {}
    ranks = {name: len(graph.values[name].shape) for name in graph.inputs}
    followed = {name: (name, tuple(range(rank))) for name, rank in ranks.items()}
    for step in steps:
        given = [r.name for _, r in leaves((step.args, step.kwargs), Ref) if r.kind == "value" and r.name in followed]
        if not given or step.kind == "guard":
            continue
        kind, (source, dims) = name_of(step), followed[given[0]]
        op = find(kind)
        if op is not None and op.kind in _BY_PIXEL:
            if dims[0] == 0 and len(dims) > 2:
                found.setdefault(source, dims[2:])
            continue
        if op is not None and op.kind == "view":
            dims = tuple(dims[d] for d in _order(step, len(dims)))
        followed |= {name: (source, dims) for name in step.outputs if len(graph.values[name].shape) == len(dims)}
    return {name: found.get(name, tuple(range(2, rank))) for name, rank in ranks.items()}


def _order(step: Step, rank: int) -> list[int]:
    """Where a view takes the dimensions of its operand from: sizes that no other has show it. Of one that is no
    permutation, or takes no other sizes than its own, every dimension stays."""
    numbered = torch.empty([d + 2 for d in range(rank)], device="meta")
    args: Any
    args, kwargs = substitute((step.args, step.kwargs), Ref, lambda _: numbered)
    try:
        found = [n - 2 for n in step.target(*args, **kwargs).shape]
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        found = []
    return found if sorted(found) == list(range(rank)) else list(range(rank))


def has_channels_last(axes: tuple[int | None, ...]) -> bool:
    """Whether a map, by the axes of its dimensions, is (batch, pixels..., channels)."""
    return len(axes) > 2 and axes[1] is not None and axes[-1] is None
