"""The bias of a convolution with the ReLU of its output, as one operation.

On a GPU torch adds a convolution's bias in a pass of its own, ReLU is another, and in backward the bias's gradient is
summed in a pass over what ReLU's backward has just written. In networks without norms (VGG, AlexNet) these passes are
most of what is not convolution.

                 torch                                          here
    forward      read, write; read, write                       read, write
    backward     read 2, write; read                            read 2, write

The convolution runs without its bias, and ReLU's step adds it. What is saved is the same: ReLU's output, which is the
next convolution's input. Numbers of forward are torch's bit for bit; the bias's gradient is summed in another order, so
this needs results that may be *reassociated*. Gradients of gradients do not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outcore.cost.costs import CallCost, Costs
from outcore.graph import Graph
from outcore.graph.record.recording import Ref, Step
from outcore.graph.strides import has_known_format, known_format
from outcore.machine.clock import TimedRuns
from outcore.memory.op_fusion.pattern import ReaderPatterns, hooked
from outcore.memory.op_fusion.profitability import RATE, less, totals

Biases = Mapping[str, str]
"""Call of a convolution -> call of the ReLU that is the only reader of its output."""
_DEVICES = {"cuda"}
"""Devices on which adding the bias is a pass of its own."""
_ISSUE = 2.0
"""Host time of ReLU with a bias over that of torch's ReLU: an estimate."""


def biases_of(graph: Graph, model: nn.Module, device: torch.device) -> dict[str, str]:
    """The convolutions whose bias can be fused with a ReLU."""
    if device.type not in _DEVICES:
        return {}
    after = ReaderPatterns(graph, model)
    found = {name: after.relu(name) for name in graph.calls if _convolves(after.steps[name], model)}
    return {name: relu for name, relu in found.items() if relu is not None}


def _convolves(step: Step, model: nn.Module) -> bool:
    if step.kind != "module" or len(step.args) != 1 or step.kwargs or not isinstance(step.args[0], Ref):
        return False
    module = model.get_submodule(step.target)
    return type(module) in (nn.Conv2d, nn.Conv3d) and module.bias is not None and not hooked(module)


def worth_it(biases: Biases, costs: Costs, *, issued: bool) -> bool:
    """Whether the host, which needs longer to launch fused calls, stays ahead of the device."""
    if not issued:
        return True
    device_s, host_s = totals(costs)
    times = [t for relu in biases.values() for t in _times(costs.calls[relu])]
    return host_s + (_ISSUE - 1) * sum(t.dispatch_s for t in times) <= device_s or not any(t.dispatch_s for t in times)


def as_biased(costs: Costs, biases: Biases, memory_bytes_per_s: float) -> Costs:
    """Costs in which biases are fused with their ReLUs: three passes over the convolution's output less."""
    calls = dict(costs.calls)
    for name in biases:
        cost = calls[name]
        second = cost.output_bytes / (RATE * memory_bytes_per_s)
        forward, backward = less(cost.forward, 2 * second), less(cost.backward, second)
        calls[name] = replace(cost, forward=forward, backward=backward)
    return replace(costs, calls=calls)


def _times(cost: CallCost) -> list[TimedRuns]:
    return [t for t in (cost.forward, cost.backward) if t is not None]


def rectifiers(graph: Graph, model: nn.Module, biases: Biases) -> dict[str, Step]:
    """The steps that replace the recorded ones, where biases are fused with their ReLUs."""
    steps = graph.recording.calls()
    found = {}
    for convolution, relu in biases.items():
        module = model.get_submodule(steps[convolution].target)
        found[convolution] = replace(steps[convolution], kind="function", target=_Unbiased(module))
        found[relu] = replace(steps[relu], kind="function", target=_Rectifier(module))
    return found


class _Unbiased:
    """A convolution without its bias."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module: Any = self.module
        result: torch.Tensor = module._conv_forward(x, module.weight, None)
        return result


class _Rectifier:
    """The bias of a convolution, then ReLU; always in place, since nothing else reads its input."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        module: Any = self.module
        if not has_known_format(x):
            return torch.relu_(x.add_(module.bias.to(x.dtype).view(-1, *(1,) * (x.dim() - 2))))
        result: torch.Tensor = _Biased.apply(x, module.bias)  # type: ignore[no-untyped-call]
        return result


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Bias and ReLU in one pass, in place."""
        if x.is_cuda:
            from outcore.kernels.bias_relu import biased

            biased(x, bias)
            torch.autograd.graph.increment_version(x)
        else:
            x.add_(bias.to(x.dtype).view(-1, *(1,) * (x.dim() - 2))).relu_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.kind = bias.dtype
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradient where the output is above zero, and its sums, in one pass."""
        (y,) = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=known_format(y))
        if y.is_cuda:
            from outcore.kernels.bias_relu import gradients

            return gradients(gradient, y, ctx.kind)
        through = torch.where(y <= 0, 0, gradient)
        return through, through.sum([0, *range(2, y.dim())], dtype=ctx.kind)
