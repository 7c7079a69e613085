"""What a step is tried with before training: arguments with content, and a loss."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from outcore.compiled.torch_partitioner import CompilationError
from outcore.graph.structure import leaves, substitute

__all__ = ["distinct_bytes", "total_of", "with_content"]


def with_content(args: Any, kwargs: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments to run with: numbers where only shapes were given."""

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
            return tensor
        make = torch.randn if tensor.dtype.is_floating_point else torch.zeros
        return make(tuple(tensor.shape), dtype=tensor.dtype, device=device).requires_grad_(tensor.requires_grad)

    found: tuple[tuple[Any, ...], dict[str, Any]] = substitute((args, kwargs), torch.Tensor, real)
    return found


def distinct_bytes(tensors: list[torch.Tensor]) -> int:
    """The bytes of tensors, shared memory once."""
    return sum({(t.device, t.data_ptr(), t.nbytes): t.nbytes for t in tensors}.values())


def total_of(output: Any) -> torch.Tensor:
    """The sum of all results that lead back to parameters."""
    found = [t for _, t in leaves(output, torch.Tensor) if t.requires_grad and t.is_floating_point()]
    if not found:
        raise CompilationError("nothing that this model returns leads back to a parameter that requires a gradient")
    return torch.stack([t.float().sum() for t in found]).sum()
