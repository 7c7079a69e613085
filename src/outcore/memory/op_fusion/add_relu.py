"""The sum of two values with the in-place ReLU that follows, as one operation: the end of residual blocks.

Torch passes over memory three times for the sum and twice for ReLU; together it is three times. The numbers are torch's
bit for bit, forward and backward, and what is saved is the same: ReLU's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outcore.cost.costs import Costs
from outcore.graph import Graph
from outcore.graph.record.recording import Ref, Step
from outcore.graph.strides import has_known_format
from outcore.machine.clock import TimedRuns
from outcore.memory.op_fusion.pattern import ReaderPatterns
from outcore.memory.op_fusion.rewrite import as_it_is
from outcore.ops.registry import names

Sums = Mapping[str, str]
"""Call of a sum -> call of the ReLU that overwrites it."""
_SUMS = names("add")
_DEVICES = {"cuda"}
"""Devices on which a sum costs its passes over memory."""


def sums_of(graph: Graph, model: nn.Module, device: torch.device) -> dict[str, str]:
    """The sums that can be fused with the ReLU that follows."""
    if device.type not in _DEVICES:
        return {}
    after = ReaderPatterns(graph, model)
    sums = [name for name, call in graph.calls.items() if graph.blocks[call.block].type in _SUMS]
    found = {name: after.relu(name) for name in sums if _alike(after.steps[name], graph)}
    return {name: relu for name, relu in found.items() if relu is not None and _writes_over(graph, name, relu)}


def _alike(step: Step, graph: Graph) -> bool:
    """Whether a step adds two different values of the same layout."""
    if step.kind != "function" or len(step.args) != 2 or step.kwargs or not all(isinstance(a, Ref) for a in step.args):
        return False
    if any(a.kind != "value" for a in step.args):
        return False
    one, other = (graph.values[a.name] for a in step.args)
    return one.base != other.base and (one.shape, one.stride, one.dtype) == (
        other.shape,
        other.stride,
        other.dtype,
    )


def _writes_over(graph: Graph, name: str, relu: str) -> bool:
    """Whether a ReLU overwrites the sum in place."""
    total, result = (graph.values[graph.calls[call].outputs[0]] for call in (name, relu))
    return total.base == result.base


def as_summed(costs: Costs, sums: Sums) -> Costs:
    """Costs in which ReLUs after sums take no time in forward."""
    calls = dict(costs.calls)
    for relu in sums.values():
        calls[relu] = replace(calls[relu], forward=TimedRuns.of([0.0]))
    return replace(costs, calls=calls)


def summed(graph: Graph, sums: Sums) -> dict[str, Step]:
    """The steps that replace the recorded ones."""
    steps = graph.recording.calls()
    found = {}
    for name, relu in sums.items():
        inplace = graph.blocks[graph.calls[name].block].type != "add"
        found[name] = replace(steps[name], target=_Summed(inplace))
        found[relu] = replace(steps[relu], kind="function", target=as_it_is)
    return found


class _Summed:
    """A sum fused with its ReLU."""

    def __init__(self, inplace: bool) -> None:
        self.inplace = inplace

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape != y.shape or x.stride() != y.stride() or x.dtype != y.dtype or not has_known_format(x):
            return torch.relu_(x.add_(y) if self.inplace else x + y)
        result: torch.Tensor = _Sum.apply(x, y, self.inplace)  # type: ignore[no-untyped-call]
        return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, inplace: bool) -> torch.Tensor:
        """Sum and ReLU in one pass."""
        out = x if inplace else torch.empty_like(x)
        if x.is_cuda:
            from outcore.kernels.bias_relu import rectified_sum

            rectified_sum(x, y, out)
            torch.autograd.graph.increment_version(out)
        else:
            torch.add(x, y, out=out).relu_()
        if inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """ReLU's gradient, which both operands get."""
        (out,) = ctx.saved_tensors
        through = torch.ops.aten.threshold_backward(gradient, out, 0)
        return through, through, None
