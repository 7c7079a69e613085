"""One kernel that steps all members on a GPU.

The stacked parameters of a stack are one piece of memory, and so is the state this makes for them. A kernel of one
program per thousand elements knows for each which member it belongs to, and reads that member's hyperparameters;
members that are not alive are skipped. SGD, Adam and AdamW in single precision have one; the others take the formula of
`outcore.fusion.optimizer.updates`, some ten kernels per parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from outcore.fusion.stack import Stack

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class FlatUpdate:
    """The update of some parameters by one kernel."""

    kind: Literal["sgd", "adam"]
    maximize: bool
    nesterov: bool
    names: tuple[str, ...]
    shapes: tuple[tuple[torch.Size, tuple[int, ...]], ...]
    parameters: Tensor
    grads: Tensor
    state: tuple[Tensor, ...]
    table: Tensor
    """``[4, programs]``: where a program begins in the parameters, and where in gradients and state (which hold only
    these parameters), how many elements it has, and whose it is."""

    @classmethod
    def find(
        cls,
        optimizer: type[torch.optim.Optimizer],
        stack: Stack,
        state: dict[str, dict[str, Tensor]],
        names: Sequence[str],
        group: Mapping[str, Any],
    ) -> FlatUpdate | Literal[False]:
        """A kernel for these parameters, with their state moved into one piece of memory; False where there is none."""
        tensors = [stack.parameters[n] for n in names]
        known = optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW) and not group.get("amsgrad")
        there = all(t.is_cuda and t.dtype == torch.float32 for t in tensors) and stack.places.keys() >= set(names)
        if not known or not there or not _has_triton():
            return False
        keys = list(state[names[0]])
        parameters, size = stack.flat[torch.float32], sum(t.numel() for t in tensors)
        pieces = [torch.empty(size, device=parameters.device) for _ in keys]
        begin = 0
        for name, tensor in zip(names, tensors, strict=True):
            for key, piece in zip(keys, pieces, strict=True):
                moved = piece.as_strided(tensor.shape, tensor.stride(), begin)
                moved.copy_(state[name][key])
                state[name][key] = moved
            begin += tensor.numel()
        table = _table(stack, names, tensors)
        return cls(
            "sgd" if optimizer is torch.optim.SGD else "adam",
            bool(group.get("maximize")),
            bool(group.get("nesterov")),
            tuple(names),
            tuple((t.shape, t.stride()) for t in tensors),
            parameters,
            torch.empty(size, device=parameters.device),
            tuple(pieces),
            table.to(parameters.device),
        )

    def __call__(self, grads: Mapping[str, Tensor], numbers: Tensor, alive: Tensor) -> None:
        """Step."""
        from outcore.kernels import stacked_optimizer

        launch: Any = stacked_optimizer.step
        torch.cat([_in_order(grads[n], *like) for n, like in zip(self.names, self.shapes, strict=True)], out=self.grads)
        launch(self, numbers, alive, _BLOCK)


def _table(stack: Stack, names: Sequence[str], tensors: Sequence[Tensor]) -> Tensor:
    rows: list[tuple[int, int, int, int]] = []
    begun = 0
    for name, tensor in zip(names, tensors, strict=True):
        each = tensor[0].numel()
        for slot in range(tensor.shape[0]):
            for start in range(0, each, _BLOCK):
                offset = slot * each + start
                rows.append((stack.places[name] + offset, begun + offset, min(_BLOCK, each - start), slot))
        begun += tensor.numel()
    return torch.tensor(rows, dtype=torch.int64, device="cpu").t().contiguous()


def _in_order(grad: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """The gradient's elements in the order of the parameter's memory."""
    if grad.stride() != stride:
        grad = torch.empty_strided(shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
    return grad.as_strided((grad.numel(),), (1,))


def _has_triton() -> bool:
    import importlib.util

    return importlib.util.find_spec("triton") is not None
