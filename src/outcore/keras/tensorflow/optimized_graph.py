"""The graph that TensorFlow runs, which is not the one that it has traced.

Before a function runs, Grappler rewrites its graph. That changes what is held: of a product of three factors, two of
which are known in forward, it may take those two first, by the order of the operations' *names*; in a vision
transformer this makes one score matrix more for every layer, held from forward to backward. So the memory of a step is
read off the rewritten graph. Nothing is run for it; Grappler is given the traced graph as TensorFlow would.

Functions that operations call (the loops of recurrent layers) are not found again in the rewritten graph; a graph with
such calls is taken as it was traced.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["OptimizedGraph", "optimized"]

_CALLS = {"While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase", "PartitionedCall",
          "StatefulPartitionedCall"}  # fmt: skip


class OptimizedGraph:
    """Operations, outputs and effects of a rewritten graph, as `graph_memory` reads them off a function's."""

    def __init__(self, graph: Any, outputs: list[Any], control_outputs: list[Any]) -> None:
        self.graph, self.outputs, self.control_outputs = graph, outputs, control_outputs

    def get_operations(self) -> list[Any]:
        """In the order of the graph."""
        return list(self.graph.get_operations())


def optimized(function: Any) -> Any:
    """The graph of a traced function as Grappler leaves it; the traced one where that cannot be read."""
    graph = function.graph
    if any(op.type in _CALLS for op in graph.get_operations()):
        return graph
    tf = importlib.import_module("tensorflow")
    optimizer = importlib.import_module("tensorflow.python.grappler.tf_optimizer")
    saver = importlib.import_module("tensorflow.python.training.saver")
    context = importlib.import_module("tensorflow.python.eager.context")
    protocol = importlib.import_module("tensorflow.core.protobuf.meta_graph_pb2")
    effects = [op.name for op in graph.control_outputs]
    kept = protocol.CollectionDef()
    kept.node_list.value.extend([*(t.name for t in (*graph.inputs, *graph.outputs)), *effects])
    try:
        meta = saver.export_meta_graph(graph_def=graph.as_graph_def(), graph=graph)
        meta.collection_def["train_op"].CopyFrom(kept)
        found = optimizer.OptimizeGraph(context.context().config, meta)
        _name_variables(tf, graph, found)
        new = tf.Graph()
        with new.as_default():
            tf.graph_util.import_graph_def(found, name="")
        outputs = [new.get_tensor_by_name(t.name) for t in graph.outputs]
        return OptimizedGraph(new, outputs, [new.get_operation_by_name(name) for name in effects])
    except (ValueError, KeyError, tf.errors.OpError):
        return graph


def _name_variables(tf: Any, graph: Any, found: Any) -> None:
    """Make of a function's captured variables variables of the graph, so that what is read of them has a shape."""
    handles = importlib.import_module("tensorflow.python.ops.handle_data_util")
    captured = {t.op.name: t for t in graph.inputs if t.dtype == tf.resource}
    for node in found.node:
        if node.name in captured:
            data = handles.get_resource_handle_data(captured[node.name])
            if data.shape_and_type:
                node.op = "VarHandleOp"
                node.attr.clear()
                node.attr["dtype"].type = data.shape_and_type[0].dtype
                node.attr["shape"].shape.CopyFrom(data.shape_and_type[0].shape)
