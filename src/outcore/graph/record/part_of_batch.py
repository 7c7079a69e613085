"""The same network, recorded with fewer samples.

What a call takes of a micro-batch is known from a recording of one. A graph remembers what it was recorded with, as
tensors without content (`CapturedModule.given`), so the part is cut out as the engine cuts a batch: of every tensor
whose first dimension is that of the first one, the first rows. Modes of the recording (autocast) hold again.

Invariant: a part has the calls of the whole, by name and type, and values of the same dtypes; Python that runs
something else on fewer samples makes another network, which says nothing of this one.
"""

from __future__ import annotations

from typing import Any

import torch

from outcore.errors import CaptureError
from outcore.graph.graph import Graph
from outcore.graph.record.capture import capture
from outcore.graph.structure import leaves, substitute

__all__ = ["batch_size", "capture_part"]


def batch_size(graph: Graph) -> int:
    """Samples of the batch that a graph was recorded with: the first dimension of its first input."""
    return max((graph.values[v].shape[0] for v in graph.inputs[:1] if graph.values[v].shape), default=1)


def capture_part(graph: Graph, size: int) -> Graph:
    """The graph of the same model with so many samples of its batch.

    Raises:
        CaptureError: it was not recorded here, cannot be recorded with so few, or runs other calls with them.
    """
    if graph.executable is None or (given := graph.executable[0].given) is None:
        raise CaptureError("what this graph was recorded with is not known, so a part of it cannot be recorded")
    count = next((t.shape[0] for _, t in leaves(given, torch.Tensor) if t.ndim), 0)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:size] if tensor.ndim and tensor.shape[0] == count else tensor

    args, kwargs = substitute(given, torch.Tensor, rows)
    with graph.executable[1].ambient.entered():
        part = capture(graph.module.model, args, kwargs)
    if (there := _calls(part)) != (here := _calls(graph)):
        other = next((n for n in (*here, *there) if here.get(n) != there.get(n)), "the order of its calls")
        raise CaptureError(f"with {size} of {count} samples the network runs other calls: {other}")
    return part


def _calls(graph: Graph) -> dict[str, Any]:
    """What a network runs: type of every call, and dtypes of what it makes."""
    return {
        name: (graph.blocks[call.block].type, tuple(graph.values[v].dtype for v in call.outputs))
        for name, call in graph.calls.items()
    }
