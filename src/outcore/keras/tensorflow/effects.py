"""What a call of a Keras model does beside its result: the variables it reads and changes, and everything else.

A call that is run again in backward has to do the same as the first time, and to leave no second trace. What it reads
and changes of Keras' variables is known, and carried in and out. Anything else that has an effect or a state is not:
`tf.nn.dropout` draws from a state of TensorFlow's own, so the second run has another mask, and a Python function may do
whatever it likes. TensorFlow says of each kind of operation whether it has a state; loops and branches are looked into.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Effects", "effects_of"]

_READS = {
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"),
    *("LookupTableFindV2", "LookupTableSizeV2", "Assert", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"),
}
"""Operations with a state that find the same again if they are run twice; of cuDNN's, Keras uses no dropout."""


@dataclass(frozen=True)
class Effects:
    """What the operations of a call read and change."""

    pure: bool
    """Whether running it again does the same: it reads its own variables alone, changes none of them that is trained,
    and does nothing else that has a state."""
    changes: bool
    """Whether it changes anything but its own seeds."""


def effects_of(call: Any, operations: Iterable[Any], outer: Mapping[Any, Any]) -> Effects:
    """The effects of a call.

    Args:
        call: of a model.
        operations: that were traced for it.
        outer: the resource outside of the graph, by the one in it.
    """
    trained = {id(v.value.handle): v.trainable for v in call.variables}
    seeds = {id(v.value.handle) for v in call.variables if "seed_generator" in v.name}
    pure, changes = True, False
    for kind, stateful, resources, inside in _operations(operations, outer):
        known = [trained.get(id(resource)) for resource in resources]
        pure = pure and None not in known
        if kind.startswith("Assign"):
            pure = pure and not inside and True not in known[:1]
            changes = changes or any(id(resource) not in seeds for resource in resources[:1])
        elif stateful and kind not in _READS:
            pure, changes = False, True
    return Effects(pure, changes)


def _operations(
    operations: Iterable[Any], outer: Mapping[Any, Any], inside: bool = False
) -> Iterator[tuple[str, bool, list[Any], bool]]:
    """Kinds of operations, whether they have a state, the resources they take, and whether they are inside a function.

    An operation that runs functions is not among them; what these do is.
    """
    for op in operations:
        functions = list(_functions(op))
        for function in functions:
            graph = function.graph
            given = list(op.inputs)[len(op.inputs) - len(graph.inputs) :]
            pairs = zip(graph.inputs, given, strict=True)
            passed = {inner.ref(): outer[x.ref()] for inner, x in pairs if x.ref() in outer}
            yield from _operations(graph.get_operations(), passed, True)
        if not functions:
            resources = [outer[x.ref()] for x in op.inputs if x.ref() in outer]
            yield op.type, bool(op.op_def.is_stateful), resources, inside


def _functions(op: Any) -> Iterator[Any]:
    """The functions that an operation runs: bodies of loops, branches, traced functions."""
    for attribute in op.op_def.attr:
        if attribute.type in ("func", "list(func)"):
            value = op.get_attr(attribute.name)
            for one in value if isinstance(value, list) else [value]:
                if one.name:
                    yield op.graph._get_function(one.name)
