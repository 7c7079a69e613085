"""A compiled model whose last layer and loss run apart, in chunks.

Inductor's kernels make logits and their gradients whole. Where that does not fit, the graph that torch.compile has
traced is cut before AOTAutograd sees it: everything up to the input of the last layer is compiled as ever, within what
is left of the budget; the last layer, and all that depends on its result, run as they are written, on lazy rows
(`outcore.memory.chunked_loss`), chunk by chunk.

    traced graph:  tokens ──▶ … blocks … ──▶ hidden │ ──▶ linear ──▶ … ──▶ cross entropy
                          compiled, planned         │        chunks of rows

A graph that writes in place after the last layer is left whole: then the cut could change the order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from outcore.memory.chunked_loss.lazy_rows import lazily

__all__ = ["HeadApart", "with_head_apart"]

Backend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


@dataclass(frozen=True)
class HeadApart:
    """Which layer runs apart."""

    shape: tuple[int, ...]
    """Of its result."""
    rows_per_chunk: int
    held_bytes: int
    """What its chunks and the gradients of its operands take."""


def with_head_apart(backend: Backend, head: HeadApart) -> Backend:
    """A backend of torch.compile that gives another one all but the last layer and what depends on it."""

    def compile_rest(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        node = _head_of(graph.graph, head)
        if node is None:
            return backend(graph, inputs)
        body, tail, to_tail, results = _cut(graph, node, head.rows_per_chunk)
        compiled = backend(body, inputs)

        def apart(*given: Any) -> Any:
            made = compiled(*given)
            ended = tail(*(given[at] if where == "input" else made[at] for where, at in to_tail))
            return tuple(made[at] if where == "body" else ended[at] for where, at in results)

        run: Callable[..., Any] = torch.compiler.disable(apart)
        return run

    return compile_rest


def _head_of(graph: fx.Graph, head: HeadApart) -> fx.Node | None:
    """The node of the layer, if everything after it only computes."""
    nodes = list(graph.nodes)
    products = [n for n in nodes if n.op == "call_function" and getattr(n.target, "__name__", "") == "linear"]
    products = [n for n in products if tuple(_shape(n)) == head.shape]
    if not products:
        return None
    node: fx.Node = products[-1]
    for later in nodes[nodes.index(node) :]:
        if later.op not in ("call_function", "call_method", "output", "get_attr"):
            return None
        name = later.target if isinstance(later.target, str) else getattr(later.target, "__name__", "")
        if later.op != "output" and (name.endswith("_") or name == "setitem" or later.kwargs.get("out")):
            return None
        if later.kwargs.get("inplace"):
            return None
    return node


_MODES = {"_enter_autocast", "_exit_autocast", "_set_grad_enabled"}
"""What changes the modes that later calls run under: both parts have it."""


def _is_mode(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _MODES


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("example_value", node.meta.get("val"))
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _cut(
    graph: fx.GraphModule, head: fx.Node, rows_per_chunk: int
) -> tuple[fx.GraphModule, fx.GraphModule, list[tuple[str, int]], list[tuple[str, int]]]:
    """The graph in two: up to the layer, and what depends on it.

    Returns both, where each input of the second comes from (an input of the whole, or a result of the first), and where
    each result of the whole does.
    """
    after: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node is head or (node.op != "output" and any(source in after for source in node.all_input_nodes)):
            after.add(node)
    output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
    returned: list[Any] = list(output.args[0])
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]

    first, second = fx.Graph(), fx.Graph()
    in_first: dict[fx.Node, fx.Node] = {}
    in_second: dict[fx.Node, fx.Node] = {}
    needed = dict.fromkeys(
        source for node in graph.graph.nodes if node in after for source in node.all_input_nodes if source not in after
    )
    constant = [node for node in needed if node.op == "get_attr"]
    needed_values = [node for node in needed if node not in constant]
    for node in graph.graph.nodes:
        if node.op != "output" and node not in after:
            in_first[node] = first.node_copy(node, in_first.__getitem__)
    from_first = list(
        dict.fromkeys(
            [n for n in needed_values if n.op != "placeholder"]
            + [n for n in returned if isinstance(n, fx.Node) and n not in after]
        )
    )
    first.output(tuple(in_first[node] for node in from_first))
    for node in needed_values:
        in_second[node] = second.placeholder(node.name)
    for node in graph.graph.nodes:
        if node in constant or node in after or _is_mode(node):
            in_second[node] = second.node_copy(node, in_second.__getitem__)
    in_second[head].target = _Head(rows_per_chunk)
    ends = list(dict.fromkeys(n for n in returned if not isinstance(n, fx.Node) or n in after))
    second.output(tuple(in_second[n] if isinstance(n, fx.Node) else n for n in ends))
    to_tail = [("input", inputs.index(n)) if n in inputs else ("body", from_first.index(n)) for n in needed_values]
    results = [("body", from_first.index(n)) if n in from_first else ("tail", ends.index(n)) for n in returned]
    return fx.GraphModule(graph, first), fx.GraphModule(graph, second), to_tail, results


class _Head:
    """The last layer, lazily where gradients are wanted."""

    def __init__(self, rows_per_chunk: int) -> None:
        self.rows_per_chunk, self.__name__, self.__module__ = rows_per_chunk, "linear_in_chunks", __name__

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        lazy = lazily(self.rows_per_chunk, "linear", None, args, kwargs) if torch.is_grad_enabled() else None
        return lazy if lazy is not None else F.linear(*args, **kwargs)
