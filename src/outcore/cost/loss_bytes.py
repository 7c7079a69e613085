"""What a loss holds beside the output of its model.

The loss is recorded as a network of its own, on stand-ins of the output, and its peak of memory is computed as that of
any network.
"""

from __future__ import annotations

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

__all__ = ["graph_device", "loss_bytes"]


def graph_device(graph: Graph) -> torch.device:
    """Where the model of a graph is."""
    first = next(iter((*graph.module.model.parameters(), *graph.module.model.buffers())), None)
    return first.device if first is not None else torch.device("cpu")


class _Loss(nn.Module):
    """A loss as a network, on the device of its model."""

    def __init__(self, loss: Callable[[Any], torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self.loss = loss
        self.register_buffer("place", torch.empty(0, device=device), persistent=False)

    def forward(self, output: Any) -> torch.Tensor:
        """The loss of an output."""
        return self.loss(output)


def loss_bytes(graph: Graph, loss: Callable[[Any], torch.Tensor] | None) -> int:
    """What the loss holds beside the model's output, which may be any structure of tensors."""
    if loss is None or graph.executable is None:
        return 0

    def stand_in(ref: Ref) -> Any:
        value = graph.values.get(ref.name)
        if value is None:
            return ref
        dtype = getattr(torch, value.dtype)
        return torch.empty(value.shape, dtype=dtype, device="meta").requires_grad_(value.requires_grad)

    output = substitute(graph.executable[1].result, Ref, stand_in)
    try:
        alone = capture(_Loss(loss, graph_device(graph)), (output,))
        curve = memory_curve(alone, account(alone), optimizer=0.0)
    except OutcoreError as error:
        print(f"outcore: what the loss holds is not counted: {error}", file=sys.stderr)
        return 0
    return max(0, curve.peak_bytes - 2 * sum(alone.values[v].bytes for v in alone.inputs))
