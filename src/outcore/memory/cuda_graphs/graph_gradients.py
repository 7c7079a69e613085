"""Gradients that a backward recorded as CUDA graphs hands out stay what they are.

A graph writes its results to the same memory in every replay. Autograd does not copy the first gradient of a parameter,
so `p.grad` is that memory, and the next step would write over it before it adds: gradients of several batches that are
added up, or are kept, would silently be those of the last one. Loops that drop their gradients in every step need
no copy. So when a backward is over, it is noted which tensors it left, without holding them; those that are still there
when the next forward begins get memory of their own then, under the same tensor, wherever the loop may hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.utils.weak import TensorWeakRef

__all__ = ["GraphGradients", "GraphMemory"]


class GraphMemory:
    """Tells whether a tensor is in memory of CUDA graphs."""

    def __init__(self) -> None:
        self.reserved = -1
        self.ranges: list[tuple[int, int]] = []

    def __call__(self, tensor: torch.Tensor) -> bool:
        """Whether it is."""
        if tensor.device.type != "cuda":
            return False
        reserved = torch.cuda.memory_reserved(tensor.device)
        if reserved != self.reserved:
            segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
            self.ranges = [(s["address"], s["address"] + s["total_size"]) for s in segments]
            self.reserved = reserved
        place = tensor.untyped_storage().data_ptr()
        return any(first <= place < last for first, last in self.ranges)


class GraphGradients:
    """Watches the gradients of one model.

    Args:
        is_overwritten: whether the next replay writes over a tensor's memory.
    """

    def __init__(self, is_overwritten: Callable[[torch.Tensor], bool] | None = None) -> None:
        self.is_overwritten = is_overwritten if is_overwritten is not None else GraphMemory()
        self.left: list[TensorWeakRef] = []
        """What the last backward has left."""

    def keep(self) -> None:
        """Give what is still there memory of its own; before a replay."""
        found = [tensor for reference in self.left if (tensor := reference()) is not None]
        self.left = []
        for tensor in found:
            if self.is_overwritten(tensor):
                tensor.data = tensor.detach().clone()

    def watch(self, results: Iterable[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
        """Note what the backward of a forward's results leaves.

        Args:
            results: of the forward.
            leaves: whose gradients it makes.
        """

        def note() -> None:
            self.left += [TensorWeakRef(leaf.grad) for leaf in leaves if leaf.grad is not None]

        def when_over(_: torch.Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(note)

        for result in results:
            if result.requires_grad:
                result.register_hook(when_over)
