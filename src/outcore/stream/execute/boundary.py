"""The streamed part as one node of autograd: inputs and parameters in, boundary values (or a loss) out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outcore.graph.record.recording import Ref
from outcore.stream.execute.execution import Execution
from outcore.stream.execute.pixel_loss import PixelLoss, one_pass
from outcore.stream.source import StreamedImage


class _Boundary(torch.autograd.Function):
    """The streamed part: inputs and parameters in, boundary values out."""

    @staticmethod
    def forward(ctx: Any, execution: Execution, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.execution, ctx.tensors = execution, tensors
        return execution.boundary(ctx)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        execution: Execution = ctx.execution
        sums, inputs = execution.backward(dict(zip(execution.streaming.boundary, gradients, strict=True)))
        return None, *execution.gradients_of(ctx.tensors, inputs, sums)


class _Loss(torch.autograd.Function):
    """The loss over pixels; its gradients are computed in forward."""

    @staticmethod
    def forward(
        ctx: Any, execution: Execution, loss: PixelLoss, target: StreamedImage, *tensors: torch.Tensor
    ) -> torch.Tensor:
        with torch.enable_grad():
            total, sums, inputs = one_pass(execution, loss, target, gradients=True)
        ctx.found = execution.gradients_of(tensors, inputs, sums)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        return None, None, None, *(None if g is None else g * gradient.to(g.dtype) for g in ctx.found)


def run_loss(execution: Execution, given: Mapping[str, Any], loss: PixelLoss, target: StreamedImage) -> torch.Tensor:
    """The loss over all pixels, in one pass."""
    inputs, parameters = tracked(execution, given)
    if torch.is_grad_enabled() and (inputs or parameters):
        made: torch.Tensor = _Loss.apply(execution, loss, target, *inputs, *parameters)  # type: ignore[no-untyped-call]
        return made
    return one_pass(execution, loss, target, gradients=False)[0]


def tracked(execution: Execution, given: Mapping[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs and parameters that want gradients."""
    network = execution.network
    inputs = [given[name] for name in network.graph.inputs if name in execution.wants]
    calls = execution.streaming.calls
    names = dict.fromkeys(p for name, c in network.graph.calls.items() if name in calls for p in c.parameters)
    states = [network.state(Ref("state", name)) for name in names]
    return inputs, list({id(t): t for t in states if t.requires_grad}.values())


def run(execution: Execution, given: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The boundary values, with a gradient where one is wanted."""
    inputs, parameters = tracked(execution, given)
    if torch.is_grad_enabled() and (inputs or parameters):
        made: tuple[torch.Tensor, ...] = _Boundary.apply(execution, *inputs, *parameters)  # type: ignore[no-untyped-call]
        return made
    values = execution.forward()
    return tuple(values[v] for v in execution.streaming.boundary)
