"""What a loss holds beside the output of its model.

A plan of a model's own values ends with its output. A loss over every pixel holds as much again and more: cross-entropy
keeps the logarithms of all probabilities, and two gradients of that size are alive at once in its backward. The loss is
recorded as a network whose input is the output, without memory for either, and its curve is that of any other network.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from outcore.cost.costs import Costs
from outcore.cost.measured.saved_bytes import account
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.step_memory import MemoryCurve, memory_curve
from outcore.errors import OutcoreError
from outcore.graph import Graph, capture
from outcore.graph.record.recording import Ref
from outcore.graph.structure import substitute

_NUMBER_BYTES = 4


def apart(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same function with global names of its own, so that one that counts its calls does not count a recording."""
    if not isinstance(loss, types.FunctionType):
        return loss
    names = dict(loss.__globals__)
    made = types.FunctionType(loss.__code__, names, loss.__name__, loss.__defaults__, loss.__closure__)
    made.__kwdefaults__ = loss.__kwdefaults__
    return made


class _Loss(nn.Module):
    """A loss as a network, on the device of its model."""

    def __init__(self, loss: Callable[[Any], torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self.loss = loss
        self.register_buffer("place", torch.empty(0, device=device), persistent=False)

    def forward(self, output: Any) -> torch.Tensor:
        """The loss of an output."""
        return self.loss(output)


def output_of(graph: Graph) -> Any:
    """What the model of a graph returns, on the meta device."""

    def stand_in(ref: Ref) -> Any:
        value = graph.values.get(ref.name)
        if value is None:
            return ref
        dtype = getattr(torch, value.dtype)
        return torch.empty(value.shape, dtype=dtype, device="meta").requires_grad_(value.requires_grad)

    return substitute(graph.executable[1].result, Ref, stand_in) if graph.executable is not None else None


def usual_loss_bytes(graph: Graph) -> int:
    """What a loss that is not known holds: about one number for each of the output's, as cross-entropy keeps.

    >>> usual_loss_bytes(capture(nn.Conv2d(3, 2, 1), [(1, 3, 10, 10)]))
    800
    """
    return sum(_NUMBER_BYTES * math.prod(graph.values[name].shape) for name in graph.outputs)


def loss_bytes_of(graph: Graph, loss: Callable[[Any], torch.Tensor] | None, device: torch.device) -> int:
    """What the loss holds beside the model's output, which may be any structure of tensors.

    >>> from torch.nn import functional as F
    >>> graph = capture(nn.Conv2d(3, 4, 1), [(1, 3, 16, 16)])
    >>> mask = torch.zeros(1, 16, 16, dtype=torch.long)
    >>> loss_bytes_of(graph, lambda output: F.cross_entropy(output, mask), torch.device("cpu")) // (4 * 4 * 16 * 16)
    2
    """
    if loss is None or graph.executable is None:
        return 0
    try:
        alone = capture(_Loss(loss, device), (output_of(graph),))
        curve = memory_curve(alone, account(alone), optimizer=0.0)
    except OutcoreError as error:
        print(f"outcore: what the loss holds is not counted: {error}", file=sys.stderr)
        return 0
    return max(0, curve.peak_bytes - 2 * sum(alone.values[v].bytes for v in alone.inputs))


def loss_bytes_in(whole: MemoryCurve, graph: Graph, costs: Costs, optimizer: OptimizerCost) -> int:
    """The same for a step that was recorded with its loss: what makes the turn of the model's own step as high.

    A model alone keeps its output for whoever called it; a loss that does not need it to the end lets go of it, so
    this is exact where `loss_bytes_of` is a bound.

    Args:
        whole: the memory of the step with its loss.
        graph: of the model alone.
        costs: of the model alone.
        optimizer: of the step.
    """
    of_loss = [m.bytes.total for m in whole.moments if m.call and m.call not in graph.calls]
    if not of_loss:
        return 0
    own = memory_curve(graph, costs, optimizer=optimizer)
    last = [m for m in own.moments if m.phase == "forward"][-1].bytes
    gradients = sum(graph.values[name].bytes for name in graph.outputs)
    return max(of_loss) - last.total - gradients + last.workspace - costs.library_bytes
