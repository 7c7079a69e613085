"""Which values share memory, and which calls must keep their order because of it.

A view and its base are two tensors in one storage; an in-place operation writes to all values in it. Data flow alone
does not show that ``y = x[0]; x.add_(1); z = y * 2`` needs the addition before the product, so for every storage the
last writer and the readers since are recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from outcore.graph.structure import leaves

_IN_PLACE_DUNDERS = {
    f"__i{op}__"
    for op in (
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
        "mod",
        "matmul",
    )
} | {"__setitem__", "__set__"}
_NOT_WRITING = {"requires_grad_", "share_memory_", "rename_", "refine_names_"}


@dataclass(slots=True)
class _Memory:
    """The last writer and the readers of one storage so far."""

    first: str
    storage: torch.UntypedStorage
    """Held, so that no other gets its address."""
    writer: str | None = None
    readers: list[str] = field(default_factory=list)
    """Calls that read it since it was last written."""


class StorageHistory:
    """All storages seen."""

    def __init__(self) -> None:
        self._of: dict[int, _Memory] = {}

    def place(self, name: str, tensor: torch.Tensor) -> str | None:
        """Record the storage of a value; returns the first value in the same memory if it is not this one."""
        key = storage_key(tensor)
        if key is None:
            return None
        memory = self._of.setdefault(key, _Memory(name, tensor.untyped_storage()))
        return memory.first if memory.first != name else None

    def read(self, call: str, tensors: Iterable[torch.Tensor]) -> set[str]:
        """Record that a call reads; returns the calls whose writes it must come after."""
        found = self._find(tensors)
        for memory in found:
            memory.readers.append(call)
        return {memory.writer for memory in found if memory.writer}

    def write(self, call: str, tensors: Iterable[torch.Tensor]) -> set[str]:
        """Record that a call writes; returns the calls that must have read before."""
        after: set[str] = set()
        for memory in self._find(tensors):
            after.update(memory.readers)
            memory.writer, memory.readers = call, []
        return after

    def _find(self, tensors: Iterable[torch.Tensor]) -> list[_Memory]:
        keys = dict.fromkeys(storage_key(t) for t in tensors)
        return [self._of[key] for key in keys if key in self._of]


class VersionCounters:
    """Notices which of a call's arguments it writes into, by autograd's version counters."""

    def __init__(self, *arguments: Any) -> None:
        self._before = [(t, _version(t)) for _, t in leaves(arguments, torch.Tensor)]

    def changed(self) -> list[torch.Tensor]:
        """The tensors written since, each once."""
        return list({id(t): t for t, version in self._before if _version(t) != version}.values())


class SeenWrites:
    """Notices tensors that were written where nobody saw it: by an operator's overload, another thread, a library.

    The version of a tensor is noted when it is first met. It may change with the writes that are seen into its storage,
    whichever tensor these were made through, and with no others.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[int, int]] = {}
        """Tensor (id) -> its version, and how many writes into its storage had been seen."""
        self._writes: Counter[int | None] = Counter()

    def note(self, tensor: torch.Tensor) -> None:
        """Remember the version that a tensor has now."""
        self._noted[id(tensor)] = _version(tensor), self._writes[storage_key(tensor)]

    def wrote(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember that tensors have just been written."""
        self._writes.update({storage_key(t) for t in tensors})

    def missed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was written and nobody saw it."""
        if (noted := self._noted.get(id(tensor))) is None or noted[0] == _version(tensor):
            return False
        unseen = noted[1] == self._writes[storage_key(tensor)]
        self.note(tensor)
        return unseen

    def forget(self, identity: int) -> None:
        """A tensor has died."""
        self._noted.pop(identity, None)


def written_by_name(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors a function writes by torch's naming rules (for tensors whose version a recording leaves alone)."""
    targets: Any = kwargs.get("out", ())
    in_place = name in _IN_PLACE_DUNDERS or (
        name.endswith("_") and not name.endswith("__") and name not in _NOT_WRITING
    )
    if in_place and args:
        targets = (args[0], targets)
    return [t for _, t in leaves(targets, torch.Tensor)]


def _version(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():  # what asks here is no part of what is recorded
        return -1 if tensor.is_inference() else tensor._version


def storage_key(tensor: torch.Tensor) -> int | None:
    """A key of the memory of a tensor while it is alive; None for a tensor without one storage."""
    try:
        with torch._C.DisableTorchFunction():
            return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without one storage
        return None
