"""What a rank holds between steps: parameters and buffers, gradients, optimizer state, receive buffers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from outcore.run.engine.build import EngineParts
from outcore.run.engine.worker import Worker
from outcore.run.transport.p2p import HostPointToPoint

__all__ = ["held_tensors"]


def held_tensors(
    assembly: EngineParts, worker: Worker, optimizer: torch.optim.Optimizer | None
) -> Iterator[torch.Tensor]:
    """Tensors that take memory of this rank's device; idle state that waits elsewhere does not."""
    idle_state = worker.idle_state
    away = {t.data_ptr() for t in idle_state.offloaded} if idle_state is not None else set()
    found = [*assembly.local_state().values()]
    found += [p.grad for p in assembly.parameters.values() if p.grad is not None]
    if optimizer is not None:
        for row in optimizer.state.values():
            found += [value for value in row.values() if isinstance(value, torch.Tensor)]
    yield from (tensor for tensor in found if tensor.data_ptr() not in away)
    if isinstance(worker.p2p, HostPointToPoint):
        yield from worker.p2p.arena.rows()
