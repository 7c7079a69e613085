"""How many bytes of tensors are alive, counted while operations run.

A dispatch mode sees every tensor that an operation makes, at the level below autograd, so also what backward
makes. Each storage is counted when it first appears and forgotten when it dies; views share the storage of their
base and count nothing. It works on real tensors of any device and on fake ones, which have sizes but no memory.

What a kernel takes for itself and gives back before it returns is not seen here; on a GPU the allocator's own peak
is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from outcore.cost.measured.launch_count import issue_of
from outcore.graph.aliasing import storage_key


class LiveBytes(TorchDispatchMode):
    """Counts while active; `live` and `peak` are bytes, without what was announced as existing before.

    Also counts FLOPs, as torch's own counter does. That one is not used because it cannot observe
    `torch.autograd.grad`, and because it takes the weights of a grouped convolution for those of one group in backward.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.flops = 0
        self.issued = 0.0
        """Work of launching what ran (`outcore.cost.measured.launch_count`)."""
        self.made_by: dict[int, tuple[str, int | None]] = {}
        """For each living storage that appeared: the operation and the storage of its first argument."""
        self._alive: dict[int, Any] = {}
        for tensor in known:
            self._note(tensor, "", None, counted=False)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and count what it returns."""
        result = func(*args, **(kwargs or {}))
        self.issued += issue_of(func, args)
        packet = getattr(func, "_overloadpacket", func)
        if (count := flop_registry.get(packet)) is not None:
            self.flops += _flops(count, packet, args, kwargs or {}, result)
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if made:
            first = storage_key(args[0]) if args and isinstance(args[0], torch.Tensor) else None
            for tensor in made:
                self._note(tensor, str(packet), first)
        return result

    def restart(self) -> int:
        """Begin a new phase: reset the peak; returns what is alive."""
        self.peak = self.live
        return self.live

    def _note(self, tensor: torch.Tensor, operation: str, source: int | None, *, counted: bool = True) -> None:
        key = storage_key(tensor)
        if key is None or key in self._alive:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes() if counted else 0

        def gone(_: object) -> None:
            self.live -= size
            self._alive.pop(key, None)
            self.made_by.pop(key, None)

        self._alive[key] = weakref.ref(storage, gone)
        self.made_by[key] = (operation, source)
        self.live += size
        self.peak = max(self.peak, self.live)


def _flops(
    count: Callable[..., int], packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> int:
    """What torch counts for an operation; of groups, the gradient of the weight is counted as that of each group."""
    whole = count(*args, **kwargs, out_val=result)
    if packet is not torch.ops.aten.convolution_backward or len(args) < 11 or args[9] == 1 or not args[10][1]:
        return whole
    of_input = count(*args[:10], (args[10][0], False, False), out_val=result) if args[10][0] else 0
    return int(of_input + (whole - of_input) // args[9])
