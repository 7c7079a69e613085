"""How samples pass through each operation of a joint graph: the rules of `sample_wise`.

A rule is given an operation of which at least one operand has samples, and says where those of its result lie, or
raises `MixedError` if an entry of one sample might reach another. Operations are those that are left after
torch.compile's decompositions, by their names in `aten` and `prims`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

__all__ = ["Found", "MixedError", "SampleTracking", "Samples", "Uniform", "Where", "name_of", "repeats", "shape_of"]


@dataclass(frozen=True)
class Samples:
    """Where the samples of a value lie."""

    dim: int
    outer: int = 1
    """How often all samples follow each other in that dimension."""


class MixedError(Exception):
    """An operation may carry numbers from one sample to another."""


@dataclass(frozen=True)
class Uniform:
    """The same number everywhere, whatever the shape: zeros of a batch's size, or random numbers."""


UNIFORM = Uniform()
Where = Samples | Uniform | None
Found = Where | tuple[Where, ...]
Rule = Callable[["SampleTracking", fx.Node], Found]
RULES: dict[str, Rule] = {}


class SampleTracking:
    """What is known of the values that were read so far."""

    def __init__(self, batch: int, where: dict[fx.Node, Any]) -> None:
        self.batch, self.where = batch, where

    def read(self, node: fx.Node) -> None:
        """Add what is known of a node's result."""
        if node.op in ("placeholder", "get_attr"):
            self.where.setdefault(node, None)
            return
        if node.op != "call_function":
            raise MixedError(node.name)
        if node.target is operator.getitem:
            whole, number = cast("tuple[fx.Node, int]", node.args)
            found = self.where[whole]
            self.where[node] = found[number] if isinstance(found, tuple) else found
            return
        known = [self.where.get(source) for source in node.all_input_nodes]
        if not any(isinstance(each, (Samples, Uniform, tuple)) for each in known):
            self.where[node] = _made(node)
            return
        rule = RULES.get(name_of(node))
        if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            rule = _pointwise
        if rule is None:
            raise MixedError(node.name)
        self.where[node] = rule(self, node)

    def of(self, value: object) -> Where:
        """Where the samples of an argument lie."""
        found = self.where.get(value) if isinstance(value, fx.Node) else None
        if isinstance(found, tuple):
            raise MixedError("several results as one")
        return found

    def inner(self, value: fx.Node, where: Samples) -> int:
        """Entries of a sample beside each other in the samples' dimension."""
        return shape_of(value)[where.dim] // (where.outer * self.batch)


def name_of(node: fx.Node) -> str:
    """An operation's name, without its overload."""
    return node.target.__name__.split(".")[0] if callable(node.target) else str(node.target)


def shape_of(node: object) -> tuple[int, ...]:
    """The shape of a node's one result."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _made(node: fx.Node) -> Where:
    """A value that is made from none with samples."""
    if name_of(node) in _DRAWN:
        return UNIFORM
    return UNIFORM if name_of(node) in _FILLED and shape_of(node) else None


_FILLED = frozenset("full zeros ones empty scalar_tensor".split())
_DRAWN = frozenset("inductor_random rand randn bernoulli rand_like randn_like".split())
"""Random numbers: each sample has its own, whichever they are."""


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def _only(where: Where) -> Samples:
    """The samples of a value that has to have some."""
    if not isinstance(where, Samples):
        raise MixedError("no samples")
    return where


def argument_of(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """An argument that is given by place or by name."""
    if len(node.args) > place:
        return node.args[place]
    return node.kwargs.get(name, default)


def _dims(dims: Any, rank: int) -> set[int]:
    """Dimensions as numbers from the front; all, if none is given."""
    if dims is None or dims == []:
        return set(range(rank))
    return {d % rank for d in ([dims] if isinstance(dims, int) else dims)}


@_rule("where", "clone", "_to_copy", "alias", "detach", "lift_fresh_copy", "masked_fill", "contiguous", "copy")
def _pointwise(reading: SampleTracking, node: fx.Node) -> Where:
    """Every entry is made of the entries at the same place."""
    shape = shape_of(node)
    places: set[tuple[int, int]] = set()
    operands = node.all_input_nodes
    for operand in operands:
        where = reading.of(operand)
        if isinstance(where, Samples):
            places.add((where.dim - len(shape_of(operand)), where.outer))
    if not places:
        return UNIFORM if all(reading.of(o) is UNIFORM or not shape_of(o) for o in operands) else None
    if len(places) > 1:
        raise MixedError(node.name)
    ((back, outer),) = places
    for operand in operands:
        sizes = shape_of(operand)
        if reading.of(operand) is None and len(sizes) >= -back and sizes[back] != 1:
            if not repeats(operand, len(sizes) + back):
                raise MixedError(node.name)  # something of the batch's size that is not split with it
    return Samples(len(shape) + back, outer)


@_rule("view", "_unsafe_view", "reshape", "_reshape_copy", "squeeze", "unsqueeze", "view_copy", "flatten")
def _view(reading: SampleTracking, node: fx.Node) -> Where:
    """The same entries in the same order."""
    source = node.args[0]
    where = reading.of(source)
    if not isinstance(where, Samples):
        return where
    shape, old = shape_of(node), shape_of(source)
    before = math.prod(old[: where.dim]) * where.outer
    passed = 1
    for dim, size in enumerate(shape):
        if before % passed == 0:
            outer = before // passed
            if size % (outer * reading.batch) == 0:
                return Samples(dim, outer)
        passed *= size
    raise MixedError(node.name)


@_rule("as_strided")
def _as_strided(reading: SampleTracking, node: fx.Node) -> Found:
    """A view, where it is one of the whole as it lies."""
    source, made = node.args[0], node.meta["val"]
    there = source.meta["val"]  # type: ignore[union-attr]
    if not (there.is_contiguous() and made.is_contiguous() and there.numel() == made.numel()):
        raise MixedError(node.name)
    return _view(reading, node)


@_rule("permute")
def _permute(reading: SampleTracking, node: fx.Node) -> Where:
    where = reading.of(node.args[0])
    if not isinstance(where, Samples):
        return where
    order: Any = node.args[1]
    return Samples([d % len(order) for d in order].index(where.dim), where.outer)


@_rule("expand")
def _expand(reading: SampleTracking, node: fx.Node) -> Where:
    where = reading.of(node.args[0])
    if not isinstance(where, Samples):
        return where
    return Samples(where.dim + len(shape_of(node)) - len(shape_of(node.args[0])), where.outer)


@_rule("sum", "mean", "prod", "amax", "amin", "var", "std", "var_mean", "any", "all", "argmax", "argmin", "logsumexp")
@_rule("max", "min", "std_mean", "prepare_softmax_online")
def _reduction(reading: SampleTracking, node: fx.Node) -> Where | tuple[Where, ...]:
    """Some dimensions become one number, the samples' not among them."""
    source = node.args[0]
    where = _only(reading.of(source))
    rank = len(shape_of(source))
    if name_of(node) in ("max", "min") and len(node.args) < 2:
        raise MixedError(node.name)
    gone = _dims(argument_of(node, 1, "dim"), rank)
    if where.dim in gone:
        raise MixedError(node.name)
    values = node.meta["val"]
    first = values[0] if isinstance(values, (tuple, list)) else values
    kept = first.dim() == rank
    found = Samples(where.dim if kept else where.dim - sum(d < where.dim for d in gone), where.outer)
    return (found,) * len(values) if isinstance(values, (tuple, list)) else found


@_rule("_softmax", "_log_softmax", "cumsum", "cumprod", "flip", "rev", "roll", "logcumsumexp")
@_rule("sort", "topk", "cummax", "cummin")
def _along(reading: SampleTracking, node: fx.Node) -> Where | tuple[Where, ...]:
    """Other dimensions are worked along, and keep their place."""
    where = _only(reading.of(node.args[0]))
    rank, name = len(shape_of(node.args[0])), name_of(node)
    place = 2 if name in ("roll", "topk") else 1
    default = -1 if name in ("sort", "topk") else None
    named = "dims" if name in ("roll", "flip", "rev") else "dim"
    if where.dim in _dims(argument_of(node, place, named, default), rank):
        raise MixedError(node.name)
    values = node.meta["val"]
    return (where,) * len(values) if isinstance(values, (tuple, list)) else where


@_rule("cat")
def _cat(reading: SampleTracking, node: fx.Node) -> Where:
    parts = node.args[0]
    rank = len(shape_of(node))
    dim = argument_of(node, 1, "dim", 0) % rank
    found = {reading.of(part) for part in parts}  # type: ignore[union-attr]
    samples = {where for where in found if isinstance(where, Samples)}
    if len(samples) != 1 or (
        None in found
        and any(
            reading.of(p) is None and not repeats(p, next(iter(samples)).dim)
            for p in parts  # type: ignore[union-attr]
        )
    ):
        raise MixedError(node.name)
    (where,) = samples
    if where.dim == dim:
        raise MixedError(node.name)
    return where


def repeats(node: object, dim: int) -> bool:
    """Whether a value without samples is the same all along a dimension, since it was expanded there."""
    if (
        not isinstance(node, fx.Node)
        or node.op != "call_function"
        or not isinstance(node.meta.get("val"), torch.Tensor)
    ):
        return False
    if name_of(node) in ("clone", "_to_copy", "convert_element_type") and node.args:
        return repeats(node.args[0], dim)
    if name_of(node) != "expand":
        return False
    before = shape_of(node.args[0])
    at = dim - (len(shape_of(node)) - len(before))
    return at < 0 or before[at] == 1


@_rule("split", "split_with_sizes", "unbind", "chunk")
def _split(reading: SampleTracking, node: fx.Node) -> tuple[Where, ...]:
    where = _only(reading.of(node.args[0]))
    name, rank = name_of(node), len(shape_of(node.args[0]))
    dim = argument_of(node, 1 if name == "unbind" else 2, "dim", 0) % rank
    if dim == where.dim:
        raise MixedError(node.name)
    one = Samples(where.dim - (name == "unbind" and dim < where.dim), where.outer)
    return (one,) * len(node.meta["val"])


@_rule("slice", "select", "constant_pad_nd", "narrow", "unfold")
def _part(reading: SampleTracking, node: fx.Node) -> Where:
    """A part of other dimensions, or more of them."""
    source = node.args[0]
    where = reading.of(source)
    if not isinstance(where, Samples):
        return where
    old, new, name = shape_of(source), shape_of(node), name_of(node)
    if name == "constant_pad_nd":
        if old[where.dim] != new[where.dim]:
            raise MixedError(node.name)
        return where
    dim = argument_of(node, 1, "dim", 0) % len(old)
    if dim == where.dim:
        if name == "slice" and old == new:
            return where
        raise MixedError(node.name)
    return Samples(where.dim - (name == "select" and dim < where.dim), where.outer)


@_rule("index", "_unsafe_index")
def _index(reading: SampleTracking, node: fx.Node) -> Where:
    """Entries at given places of other dimensions, side by side, the same places for all samples."""
    source, indices = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    where = _only(reading.of(source))
    used = [d for d, index in enumerate(indices) if index is not None]
    if any(reading.of(indices[d]) is not None or indices[d].meta["val"].dtype is torch.bool for d in used):
        raise MixedError(node.name)
    if not used or where.dim in used or used != list(range(used[0], used[-1] + 1)):
        raise MixedError(node.name)
    if where.dim < used[0]:
        return where
    added = max(len(shape_of(indices[d])) for d in used)
    return Samples(where.dim - len(used) + added, where.outer)


@_rule("gather")
def _gather(reading: SampleTracking, node: fx.Node) -> Where:
    """Entries at places that each sample has for itself."""
    source, dim, index = node.args[:3]
    where, places = reading.of(source), reading.of(index)
    rank = len(shape_of(source))
    if not isinstance(where, Samples) or where != places or dim % rank == where.dim:  # type: ignore[operator]
        raise MixedError(node.name)
    if shape_of(source)[where.dim] != shape_of(index)[where.dim]:
        raise MixedError(node.name)
    return where


@_rule("embedding")
def _embedding(reading: SampleTracking, node: fx.Node) -> Where:
    if reading.of(node.args[0]) is not None:
        raise MixedError(node.name)
    return reading.of(node.args[1])


@_rule("mm")
def _mm(reading: SampleTracking, node: fx.Node) -> Where:
    return _product(reading, node, node.args[0], node.args[1])


@_rule("addmm")
def _addmm(reading: SampleTracking, node: fx.Node) -> Where:
    where = _product(reading, node, node.args[1], node.args[2])
    added, sizes = reading.of(node.args[0]), shape_of(node.args[0])
    back = where.dim - 2
    if added is None and (len(sizes) < -back or sizes[back] == 1):
        return where
    if isinstance(added, Samples) and (added.dim - len(sizes), added.outer) == (back, where.outer):
        return where
    raise MixedError(node.name)


def _product(reading: SampleTracking, node: fx.Node, one: object, two: object) -> Samples:
    """Rows times a matrix that all share, or a shared matrix times columns."""
    left, right = reading.of(one), reading.of(two)
    if isinstance(left, Samples) and right is None and left.dim == 0:
        return left
    if isinstance(right, Samples) and left is None and right.dim == 1:
        return right
    raise MixedError(node.name)


@_rule("bmm")
def _bmm(reading: SampleTracking, node: fx.Node) -> Where:
    """A product for each of many matrices: samples among these, or as rows or columns of one side."""
    one, two = node.args[:2]
    left, right = reading.of(one), reading.of(two)
    if left == right:
        where, apart = _only(left), _only(left).dim == 0
    elif right is None:
        where = _only(left)
        apart = where.dim == 1 or (where.dim == 0 and repeats(two, 0))
    else:
        where = _only(right)
        apart = left is None and (where.dim == 2 or (where.dim == 0 and repeats(one, 0)))
    if not apart:
        raise MixedError(node.name)
    return where


@_rule("convolution", "_low_memory_max_pool_with_offsets", "max_pool2d_with_indices", "max_pool3d_with_indices")
@_rule("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_nearest2d", "avg_pool1d")
@_rule(
    "upsample_bilinear2d", "upsample_trilinear3d", "upsample_nearest3d", "upsample_bicubic2d", "im2col", "pixel_shuffle"
)
@_rule(
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "reflection_pad2d",
    "replication_pad2d",
    "_low_memory_max_pool2d_with_offsets",
)
def _over_pixels(reading: SampleTracking, node: fx.Node) -> Where | tuple[Where, ...]:
    """Layers over pixels treat every image for itself, and all alike."""
    where = _only(reading.of(node.args[0]))
    batched = len(shape_of(node.args[0])) >= 4 or name_of(node) == "convolution"
    if where.dim != 0 or not batched or any(reading.of(other) is not None for other in node.all_input_nodes[1:]):
        raise MixedError(node.name)
    values = node.meta["val"]
    return (where,) * len(values) if isinstance(values, (tuple, list)) else where


@_rule("native_layer_norm", "native_group_norm")
def _norm(reading: SampleTracking, node: fx.Node) -> tuple[Where, ...]:
    """Norms within a sample."""
    where = _only(reading.of(node.args[0]))
    rank = len(shape_of(node.args[0]))
    first = rank - len(node.args[1]) if name_of(node) == "native_layer_norm" else 1  # type: ignore[arg-type]
    if where.dim >= first or any(reading.of(other) is not None for other in node.all_input_nodes[1:]):
        raise MixedError(node.name)
    return (where,) * len(node.meta["val"])


@_rule("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")
@_rule("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu")
@_rule("_scaled_dot_product_fused_attention_overrideable")
def _attention(reading: SampleTracking, node: fx.Node) -> tuple[Where, ...]:
    """Attention within each sequence of the batch."""
    found = {reading.of(each) for each in node.args[:3]}
    if found != {Samples(0)}:
        raise MixedError(node.name)
    for other in node.all_input_nodes:
        if other in node.args[:3]:
            continue
        where, sizes = reading.of(other), shape_of(other)
        if where != Samples(0) and not (where is None and (len(sizes) < 4 or sizes[0] == 1 or repeats(other, 0))):
            raise MixedError(node.name)
    batch = shape_of(node.args[0])[0]
    values = node.meta["val"]
    return tuple(
        Samples(0) if isinstance(v, torch.Tensor) and v.dim() >= 2 and v.shape[0] == batch else None for v in values
    )


@_rule("full_like", "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_full")
@_rule("new_ones", "new_empty", "inductor_random", "inductor_lookup_seed")
def _like(reading: SampleTracking, node: fx.Node) -> Where:
    return UNIFORM
