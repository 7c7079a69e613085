"""The truth about memory on a CPU: a real training step, with the bytes of all living tensor storages counted."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counter(TorchDispatchMode):
    """Sum of the sizes of the distinct storages that are alive, and its peak."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.references: dict[int, Any] = {}
        self.peak = 0
        for tensor in tensors:
            self.see(tensor)

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.references[key] = weakref.ref(storage, lambda _: self.forget(key))
            self.peak = max(self.peak, sum(self.sizes.values()))

    def forget(self, key: int) -> None:
        del self.sizes[key], self.references[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        return result


def counted_peak(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    make: Callable[..., torch.optim.Optimizer],
) -> int:
    """Peak live bytes of the second training step of a model that returns its loss."""
    optimizer = make(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        with Counter([*model.parameters(), *model.buffers(), *state, *inputs]) as counter:
            model(*args, **kwargs).backward()
            optimizer.step()
    return counter.peak
