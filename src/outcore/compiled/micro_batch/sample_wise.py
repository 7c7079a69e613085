"""Whether every sample of a graph's results depends on the same sample of its arguments alone.

If so, the batch can run in micro-batches, one after the other, with the same results
(`micro_batches`). The forward part of a joint graph is read once, operation by operation, and for each
value it is known along which dimension its samples lie:

    shape  (257, 4 x 8, 2)     4 samples in dimension 1, where each has 8 entries beside each other: `Samples(1, 1)`
    shape  (257 x 4, 16)       4 samples in dimension 0, 257 times one after the other:              `Samples(0, 257)`

A value without samples is the same for all: weights, positions, masks. An operation passes if its rule says that no
entry of one sample reaches another. Reductions, softmax and sorting must leave the samples' dimension alone; norms over
the batch do not, and end it. What no rule is known for ends it too, so the answer is yes only where it was shown.

A graph does not show what Python made of the batch's size: a number that was divided by it, a tensor of that length.
So the graph of a micro-batch is compared with that of the whole (`SampleWise.holds_for`): the same operations, the same
numbers, and sizes that differ where samples lie and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from outcore.compiled.micro_batch.sample_rules import (
    Found,
    MixedError,
    Samples,
    SampleTracking,
    Uniform,
    Where,
    name_of,
    repeats,
    shape_of,
)
from outcore.compiled.torch_partitioner import TracedStep

__all__ = ["SampleWise", "read_samples", "sample_inputs", "samples_of"]

_SIZES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        "view _unsafe_view reshape _reshape_copy view_copy expand new_zeros new_ones new_full".split(), (1,)
    ),
    **dict.fromkeys("full zeros ones empty rand randn inductor_random".split(), (0,)),
    "as_strided": (1, 2, 3),
    "native_group_norm": (3,),
}
"""Which arguments of an operation are sizes: that its result has the right ones is compared instead."""


@dataclass(frozen=True)
class SampleWise:
    """A forward in which every sample is for itself."""

    batch: int
    steps: tuple[tuple[str, tuple[Any, ...], Found, tuple[tuple[int, ...], ...]], ...]
    """Of each operation its name, numbers, where its samples lie, and the shapes of its results."""

    def holds_for(self, nodes: Iterable[fx.Node], batch: int) -> bool:
        """Whether another graph does the same to some of the samples.

        Args:
            nodes: of its forward, in the order of computing.
            batch: how many samples it has.
        """
        calls = [node for node in nodes if node.op == "call_function"]
        if len(calls) != len(self.steps):
            return False
        for node, (name, numbers, where, shapes) in zip(calls, self.steps, strict=True):
            if name_of(node) != name or _numbers(node) != numbers:
                return False
            several = where if isinstance(where, tuple) else (where,) * len(shapes)
            for place, shape, there in zip(several, shapes, shapes_of(node), strict=True):
                if not self._scaled(node, place, shape, there, batch):
                    return False
        return True

    def _scaled(self, node: fx.Node, where: Where, shape: tuple[int, ...], there: tuple[int, ...], batch: int) -> bool:
        """Whether a shape differs from another by the number of samples alone."""
        if isinstance(where, Samples):
            expected = list(shape)
            expected[where.dim] = expected[where.dim] // self.batch * batch
            return tuple(expected) == there
        if isinstance(where, Uniform):
            return len(shape) == len(there)
        return len(shape) == len(there) and all(
            a == b or repeats(node, dim) for dim, (a, b) in enumerate(zip(shape, there, strict=True))
        )


def sample_inputs(
    placeholders: Iterable[fx.Node], given: Sequence[torch.Tensor], own: Iterable[torch.Tensor]
) -> dict[fx.Node, int] | None:
    """The inputs of a graph that hold samples, each with their number; none if they cannot be told from weights.

    Args:
        placeholders: of the graph.
        given: the tensors of the call; those with the first one's length along their first dimension hold samples.
        own: parameters and buffers.
    """
    batch = next((t.shape[0] for t in given if t.dim()), 0)
    wanted = {(tuple(t.shape), t.dtype) for t in given if t.dim() and t.shape[0] == batch}
    if wanted & {(tuple(t.shape), t.dtype) for t in own}:
        return None
    found = {}
    for node in placeholders:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and (tuple(value.shape), value.dtype) in wanted:
            found[node] = batch
    return found


def samples_of(partition: TracedStep, given: Sequence[torch.Tensor], own: Iterable[torch.Tensor]) -> SampleWise | None:
    """The forward of a joint graph, if every sample is for itself in it; arguments as of `sample_inputs`."""
    inputs = sample_inputs(partition.inputs, given, own)
    if partition.overwrites or not inputs:
        return None
    nodes = [node for node in partition.graph.nodes if node in partition.forward or node in inputs]
    return read_samples(nodes, partition.outputs, inputs)


def read_samples(
    nodes: Iterable[fx.Node], results: Collection[fx.Node], inputs: dict[fx.Node, int]
) -> SampleWise | None:
    """A forward in which every sample is for itself, its results by their first dimension; none if that was not shown.

    Args:
        nodes: of the forward, in the order of computing.
        results: of the forward.
        inputs: placeholders that hold samples along their first dimension, each with their number.
    """
    batch = next(iter(inputs.values()), 0)
    if batch < 2:
        return None
    reading = SampleTracking(batch, {node: Samples(0) for node in inputs})
    steps = []
    try:
        for node in nodes:
            reading.read(node)
            if node.op == "call_function":
                steps.append((name_of(node), _numbers(node), reading.where[node], shapes_of(node)))
    except MixedError:
        return None
    if any(reading.where.get(node) != Samples(0) for node in results):
        return None
    return SampleWise(batch, tuple(steps))


def _numbers(node: fx.Node) -> tuple[Any, ...]:
    """What an operation is given beside tensors and sizes."""
    sizes = _SIZES.get(name_of(node), ())
    given = [argument for place, argument in enumerate(node.args) if place not in sizes]
    if name_of(node) == "slice" and shape_of(node.args[0]) == shape_of(node):
        given = given[:1]  # the whole: its end may be the size
    plain = torch.utils._pytree.tree_leaves((given, sorted(node.kwargs.items())))
    return tuple("tensor" if isinstance(x, fx.Node) else x for x in plain)


def shapes_of(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """The shapes of a node's results."""
    values = node.meta.get("val")
    several = values if isinstance(values, (tuple, list)) else (values,)
    return tuple(tuple(v.shape) if isinstance(v, torch.Tensor) else () for v in several)
