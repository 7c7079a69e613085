"""Batch norm, with the ReLU of its output if there is one, as one operation.

In training, torch passes over memory three times for the norm and twice for the ReLU in forward, eight times in
backward. As one operation it is three times and five, because ReLU needs neither its own pass nor its output: where the
gradient goes through follows from the norm's input, which is saved anyway.

                 torch                                          here
    forward      read; read, write; read, write                 read; read, write
    backward     read 2, write; read 2; read 2, write           read 2; read 2, write

And where a batch is one large image, cuDNN gives a channel to one multiprocessor; here a channel is cut into pieces.

Sums are taken in another order than torch's, so this is used only where the user accepts results that are
*reassociated*, and where it pays (`outcore.memory.op_fusion.profitability`). Gradients of gradients do not exist.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outcore.graph import Graph
from outcore.graph.record.recording import Ref, Step
from outcore.graph.strides import has_known_format, known_format
from outcore.memory.op_fusion.pattern import ReaderPatterns, hooked
from outcore.memory.op_fusion.profitability import Norms
from outcore.memory.op_fusion.rewrite import as_it_is
from outcore.memory.saved_tensors.recompute_batch_norm import NORMS, normalised, usual_order
from outcore.ops.registry import of_layer, operation


def norms_of(graph: Graph, model: nn.Module) -> dict[str, str | None]:
    """Call of a norm -> call of the ReLU that is the only reader of its output, if there is one."""
    after = ReaderPatterns(graph, model)
    return {
        name: after.relu(name)
        for name, call in graph.calls.items()
        if _fusible(after.steps[name], graph.blocks[call.block].type, model) and len(call.outputs) == 1
    }


def _fusible(step: Step, type_: str, model: nn.Module) -> bool:
    """Whether a step is a plain batch norm module in training mode, with weights and without hooks."""
    if step.kind != "module" or type_ not in NORMS or len(step.args) != 1 or not isinstance(step.args[0], Ref):
        return False
    module = model.get_submodule(step.target)
    plain = of_layer(module) is operation("batch_norm") and module.training
    return plain and module.weight is not None and not hooked(module)


def replacements(graph: Graph, model: nn.Module, norms: Norms) -> dict[str, Step]:
    """The steps that replace the recorded ones, where these norms are fused."""
    steps = graph.recording.calls()
    found = {}
    for norm, relu in norms.items():
        module = model.get_submodule(steps[norm].target)
        found[norm] = replace(steps[norm], kind="function", target=_Fused(module, relu is not None))
        if relu is not None:
            found[relu] = replace(steps[relu], kind="function", target=as_it_is)
    return found


class _Fused:
    """A batch norm, with ReLU or without."""

    def __init__(self, module: nn.Module, relu: bool) -> None:
        self.module, self.relu = module, relu

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() <= x.shape[1]:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
        module: Any = self.module
        x = x if has_known_format(x) else x.contiguous()
        given = (x, module.weight, module.bias, module, self.relu)
        result: torch.Tensor = _Norm.apply(*given)  # type: ignore[no-untyped-call]
        return result


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, module: Any, relu: bool
    ) -> torch.Tensor:
        """Statistics in one pass, normalisation and ReLU in another."""
        found = _statistics(x, module)
        ctx.save_for_backward(x, found)
        ctx.relu, ctx.kind = relu, weight.dtype
        mean, invstd, *affine = found.view(4, -1).unbind(0)
        return normalised(x, (mean, invstd), (affine[0], affine[1]), usual_order(x), relu=relu)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Two sums per channel, then the gradient of the input, each in one pass."""
        x, found = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=known_format(x))
        if x.is_cuda:
            from outcore.kernels.batch_norm_relu_backward import gradients

            return *gradients(gradient, x, found, ctx.kind, usual_order(x), ctx.relu), None, None
        return *_gradients(gradient, x, found, ctx.kind, ctx.relu), None, None


def _statistics(x: torch.Tensor, module: Any) -> torch.Tensor:
    """Mean, inverse deviation, weight and bias of every channel; updates the module's running statistics."""
    if x.is_cuda:
        from outcore.kernels.batch_norm_relu import statistics

        return statistics(x, module)
    mean, variance = (t.double() for t in torch.batch_norm_update_stats(x, None, None, 0.0))
    _follow(module, mean, variance, x.numel() // x.shape[1])
    precision = torch.float64 if x.dtype is torch.float64 else torch.float32
    rows = (mean, torch.rsqrt(variance + module.eps), module.weight.detach(), module.bias.detach())
    return torch.cat([row.to(precision) for row in rows])


def _follow(module: Any, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
    """Update the running statistics with those of one batch."""
    if module.running_mean is None:
        return
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    momentum = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked)
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
    module.running_var.lerp_((variance * (count / (count - 1))).to(module.running_var.dtype), momentum)


def _gradients(
    gradient: torch.Tensor, x: torch.Tensor, found: torch.Tensor, kind: torch.dtype, relu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of input, weight and bias."""
    shape, dims = (1, -1, *(1,) * (x.dim() - 2)), [0, *range(2, x.dim())]
    mean, invstd, weight, bias = found.view(4, -1).unbind(0)
    count = x.numel() // x.shape[1]
    g = gradient
    if relu:
        g = torch.where(normalised(x, (mean, invstd), (weight, bias), usual_order(x), relu=False) > 0, g, 0)
    g = g.to(found.dtype)
    centred = x.to(found.dtype) - mean.view(shape)
    total, along = g.sum(dims), (g * centred).sum(dims)
    slope = invstd.square() * along / count
    back = (g - total.view(shape) / count - centred * slope.view(shape)) * (invstd * weight).view(shape)
    return back.to(x.dtype), (along * invstd).to(kind), total.to(kind)
