"""Counts the bytes of tensors that are alive while code runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Current and peak bytes of storages made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            a.untyped_storage()._cdata
            for a in tree_leaves((args, kwargs))
            if isinstance(a, torch.Tensor) and not a.is_sparse
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_sparse:
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in self.known and key not in given:
                    self.known.add(key)
                    size = storage.nbytes()
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, key, size)
        return result

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size
