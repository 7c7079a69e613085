"""Weights from shapes alone: nothing is run, so a network for any machine can be planned anywhere.

Time is the longer of arithmetic over the device's rate and bytes moved over its bandwidth, plus the launch overhead.
Arithmetic has closed forms for convolutions, linear layers, matrix products, attention and recurrent layers; everything
else moves bytes. What backward needs follows the rule of the operation (a convolution saves its input, a ReLU its
result, an addition nothing); an unknown operation saves what it reads. Good for comparing places to cut; for reliable
figures, measure.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from outcore.cost.predicted.saved_bytes import kept
from outcore.graph import Call, Graph, Value
from outcore.ops.registry import find
from outcore.ops.traits import WITHOUT_WORK
from outcore.planner.pipeline.call_weights import CallWeight, CallWeights, fixed_tensors

__all__ = ["weights_from_shapes"]


def weights_from_shapes(
    graph: Graph,
    *,
    flops_per_s: float = 15e12,
    bytes_per_s: float = 900e9,
    launch_s: float = 5e-6,
    state_per_parameter: float = 2.0,
) -> CallWeights:
    """Weights of a recorded network on a device of these rates (a V100 in float32 by default).

    >>> import torch, outcore
    >>> graph = outcore.capture(torch.nn.Sequential(torch.nn.Linear(1000, 1000)), torch.empty(100, 1000))
    >>> weight = weights_from_shapes(graph, flops_per_s=1e12, bytes_per_s=1e15, launch_s=0).calls["0#0"]
    >>> round(weight.forward_s * 1e6), round(weight.backward_s * 1e6)
    (200, 200)
    """
    sizes = _trained(graph)
    fixed = fixed_tensors(graph, sizes)
    calls: dict[str, CallWeight] = {}
    for name, call in graph.calls.items():
        parameters = tuple(p for p in call.parameters if p in sizes)
        weights = [nbytes for p, nbytes in sizes.items() if p in parameters]
        flops = _flops(graph, call, sum(weights))
        moved = sum(graph.values[v].bytes for v in (*call.inputs, *call.outputs)) + sum(weights)
        if graph.blocks[call.block].type in WITHOUT_WORK:
            moved = 0
        forward = max(flops / flops_per_s, moved / bytes_per_s) + (launch_s if moved else 0.0)
        backward = 0.0
        trains = call.grad and any(graph.values[v].requires_grad for v in call.outputs)
        if trains and moved:
            through = any(graph.values[v].requires_grad for v in call.inputs)
            passes = int(through) + int(bool(parameters)) if flops else 1
            backward = max(passes * flops / flops_per_s, 1.5 * moved / bytes_per_s) + launch_s
        gradients = sum(graph.values[v].bytes for v in (*call.inputs, *call.outputs) if graph.values[v].requires_grad)
        calls[name] = CallWeight(
            forward,
            backward,
            _saved(graph, call) if trains else {},
            gradients,
            parameters,
            {p: fixed[p] for p in call.parameters if p in fixed},
            fixed_forward_s=launch_s if forward else 0.0,
            fixed_backward_s=launch_s if forward else 0.0,
        )
    return CallWeights(calls, sizes, state_per_parameter, bytes_per_s)


def _trained(graph: Graph) -> dict[str, int]:
    """Bytes of the trained parameters; a saved graph knows only sizes per layer."""
    if graph.executable is not None:
        used = {p for call in graph.calls.values() for p in call.parameters}
        every = graph.module.model.named_parameters(remove_duplicate=False)
        return {n: p.numel() * p.element_size() for n, p in every if n in used and p.requires_grad}
    sizes: dict[str, int] = {}
    for call in graph.calls.values():
        new = [p for p in call.parameters if p not in sizes and not _is_buffer(p)]
        item = _item(graph.values[call.outputs[0]]) if call.outputs else 4
        for i, parameter in enumerate(new):
            sizes[parameter] = graph.blocks[call.block].parameters * item if i == 0 else 0
    return sizes


def _is_buffer(name: str) -> bool:
    return name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")


def _item(value: Value) -> int:
    return max(1, value.bytes // max(1, prod(value.shape)))


def _kind(graph: Graph, call: Call) -> str:
    op = find(graph.blocks[call.block].type)
    return op.kind if op is not None else ""


def _flops(graph: Graph, call: Call, weight_bytes: int) -> float:
    """Twice the multiplications of one forward."""
    kind = _kind(graph, call)
    if not call.inputs or not call.outputs:
        return 0.0
    first, out = graph.values[call.inputs[0]], graph.values[call.outputs[0]]
    elements = weight_bytes / _item(out)
    if kind == "transposed convolution":
        return 2.0 * prod(first.shape) * elements / max(1, first.shape[1])
    if kind == "convolution" and len(out.shape) > 2:
        return 2.0 * prod(out.shape) * elements / max(1, out.shape[1])
    if kind == "linear":
        return 2.0 * prod(out.shape) * (first.shape[-1] if first.shape else 1)
    if kind == "matrix product":
        left = graph.values[call.inputs[-2]] if len(call.inputs) > 1 else first
        return 2.0 * prod(out.shape) * (left.shape[-1] if left.shape else 1)
    if kind == "attention" and len(call.inputs) > 1:
        keys = graph.values[call.inputs[1]]
        return 4.0 * prod(first.shape) * keys.shape[-2]
    if kind in ("recurrent", "recurrent cell"):
        return 2.0 * elements * prod(first.shape[:-1])
    return 0.0


def _saved(graph: Graph, call: Call) -> Mapping[str, int]:
    """Memory the backward of a call needs: by the operation's rule, else what it reads."""
    if graph.blocks[call.block].type in WITHOUT_WORK:
        return {}
    known = kept(graph, call.name, "cuda")
    if known is not None:
        return {entry.of: entry.bytes for entry in known}
    saved = {graph.values[v].alias_of or v: graph.values[graph.values[v].alias_of or v].bytes for v in call.inputs}
    if _kind(graph, call) in ("recurrent", "recurrent cell") and call.outputs:
        saved[f"{call.name} gates"] = 4 * graph.values[call.outputs[0]].bytes
    return saved
