"""What a loss holds beside the model's output: one answer for everything that plans for one device.

Where the loss is known it is recorded as a network of its own, on an output without memory, and its peak above output
and gradient counts. Where it is not, about one number for each of the output's, as cross-entropy and most losses over
pixels keep for their backward.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.step_memory import memory_curve
from outcore.errors import OutcoreError
from outcore.graph import Graph, capture
from outcore.graph.record.recording import Ref
from outcore.graph.structure import substitute
from outcore.stream.arguments import device_of

__all__ = ["loss_bytes"]

_NUMBER_BYTES = 4


def loss_bytes(graph: Graph, loss: Callable[[Any], torch.Tensor] | None = None) -> int:
    """Bytes that a loss holds beside the output of a graph's model, which may be any structure of tensors.

    >>> from outcore.graph import capture
    >>> graph = capture(nn.Conv2d(3, 2, 1), [(1, 3, 10, 10)])
    >>> loss_bytes(graph), loss_bytes(graph, lambda output: output.sum())
    (800, 0)

    Args:
        graph: of the model.
        loss: a function of its output; None if it is not known.
    """
    if loss is None or graph.executable is None:
        return sum(_NUMBER_BYTES * math.prod(graph.values[name].shape) for name in graph.outputs)

    def stand_in(ref: Ref) -> Any:
        value = graph.values.get(ref.name)
        if value is None:
            return ref
        dtype = getattr(torch, value.dtype)
        return torch.empty(value.shape, dtype=dtype, device="meta").requires_grad_(value.requires_grad)

    output = substitute(graph.executable[1].result, Ref, stand_in)
    try:
        alone = capture(_Loss(loss, device_of(graph.module.model)), (output,))
        curve = memory_curve(alone, account(alone), optimizer=0.0)
    except OutcoreError as error:
        print(f"outcore: what the loss holds is not counted: {error}", file=sys.stderr)
        return 0
    return max(0, curve.peak_bytes - 2 * sum(alone.values[v].bytes for v in alone.inputs))


class _Loss(nn.Module):
    """A loss as a network, on the device of its model."""

    def __init__(self, loss: Callable[[Any], torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self.loss = loss
        self.register_buffer("place", torch.empty(0, device=device), persistent=False)

    def forward(self, output: Any) -> torch.Tensor:
        """The loss of an output."""
        return self.loss(output)
