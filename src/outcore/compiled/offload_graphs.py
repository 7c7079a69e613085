"""Put copies out and back into the two graphs of a compiled step.

The forward returns a ticket in the place of a value that leaves the device, the backward is given the ticket, and its
readers read what comes back (`outcore.compiled.offload_ops`). Where each of the four operations stands is the plan's:
the copy out begins after the value is made, its memory is free after a kernel by which the copy is expected to be over,
and the copy back begins so many kernels before the first reader that it is expected to be there in time. Inductor calls
operations that it does not know in the order of the graph, between its own kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from outcore.compiled import offload_ops  # noqa: F401  (defines the operations)

__all__ = ["Copies", "insert_copies"]


@dataclass(frozen=True)
class Copies:
    """The way of one value out and back, by names of nodes."""

    value: str
    free_after: str | None
    """The node of the forward after which its memory is free; none for the last."""
    fetch_before: str | None
    """The node of the backward before which it begins to come back; none for its first reader."""


def insert_copies(forward: fx.GraphModule, backward: fx.GraphModule, copies: Sequence[Copies]) -> int:
    """Change both graphs; returns how many values leave the device.

    Args:
        forward: returns results, then what the backward is given.
        backward: is given that, then gradients of results.
        copies: what leaves; values that the graphs do not hand over stay.
    """
    output = next(node for node in reversed(forward.graph.nodes) if node.op == "output")
    returned: list[Any] = list(output.args[0])
    by_name = {node.name: node for node in forward.graph.nodes}
    given = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    inserted = 0
    for one in copies:
        value, placeholder = by_name.get(one.value), given.get(one.value)
        if value is None or placeholder is None or returned.count(value) != 1 or not placeholder.users:
            continue
        ticket = _send(forward.graph, value, by_name.get(one.free_after or ""), output)
        returned[returned.index(value)] = ticket
        _bring(backward.graph, placeholder, one.fetch_before)
        inserted += 1
    if inserted:
        output.args = (tuple(returned),)
        for module in (forward, backward):
            module.graph.lint()
            module.recompile()
    return inserted


def _call(graph: fx.Graph, name: str, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """A call of one of the operations, with what it returns in the same world of tensors without memory."""
    target = getattr(torch.ops.outcore, name).default
    node = graph.call_function(target, args)
    with like.meta["val"].fake_mode:
        node.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
    return node


def _send(graph: fx.Graph, value: fx.Node, free_after: fx.Node | None, output: fx.Node) -> fx.Node:
    fake = value.meta["val"]
    with graph.inserting_after(value):
        ticket = _call(graph, "offload_start", (value, list(fake.stride())), value)
    place = output.prev if free_after is None else free_after
    order = {node: number for number, node in enumerate(graph.nodes)}
    if order[place] < order[ticket]:
        place = ticket
    with graph.inserting_after(place):
        return _call(graph, "offload_wait", (ticket, value), value)


def _bring(graph: fx.Graph, placeholder: fx.Node, fetch_before: str | None) -> None:
    fake = placeholder.meta["val"]
    order = {node: number for number, node in enumerate(graph.nodes)}
    reader = min(placeholder.users, key=order.__getitem__)
    begin = next((node for node in graph.nodes if node.name == fetch_before and node.op != "placeholder"), reader)
    begin = min(begin, reader, key=order.__getitem__)
    with fake.fake_mode:
        placeholder.meta["val"] = torch.empty(1, dtype=torch.int64, device="cpu")
    placeholder.meta.pop("tensor_meta", None)
    with graph.inserting_before(begin):
        ticket = _call(graph, "reload_start", (placeholder,), placeholder)
    with graph.inserting_before(reader):
        layout = (list(fake.shape), list(fake.stride()), fake.dtype, fake.device)
        value = _call(graph, "reload_wait", (ticket, *layout), placeholder)
    placeholder.replace_all_uses_with(value, delete_user_cb=lambda user: user is not ticket)
