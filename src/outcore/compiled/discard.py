"""Give back what a compiled model holds that is not used any more.

A model is compiled several times until its plan fits, and each time torch keeps the result: Dynamo with the code object
of the function, for as long as that lives, which for `nn.Sequential.forward` is always. A result that was recorded as
CUDA graphs keeps their memory with it, and all graphs of a device share one pool that never becomes smaller while one
of them is there. So the next attempt would be measured with the memory of the last one beside its own, and no plan, how
small it may be, would fit. Here the entries of one partitioner are taken out of Dynamo's caches, as Dynamo itself does
when a model is gone, and what CUDA graphs keep of their results is let go, since those refer back to the graphs in a
way that Python's collector cannot see.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Hashable, Iterator
from types import CodeType
from typing import Any

import torch

__all__ = ["discard", "recorded_functions", "unused_in_pools"]


def discard(partitioner: object, device: torch.device, recorded: frozenset[Hashable] = frozenset()) -> None:
    """Forget what was compiled with a partitioner; calling it once more compiles anew.

    Args:
        partitioner: it was compiled with this one.
        device: where it ran.
        recorded: its functions that were recorded as CUDA graphs.
    """
    manager = _manager(device) if recorded else None
    for code in _codes():
        for entry in _entries(code):
            if _partitioner_of(getattr(entry, "backend", None)) is partitioner:
                _invalidate(entry)
    if manager is None:
        return
    for node in list(_nodes(manager)):
        if node.wrapped_function.id in recorded:
            with contextlib.suppress(AttributeError, AssertionError):
                node.remove_node_cached_tensors()
    gc.collect()
    container = _container(device)
    if container.live_cudagraphify_fns == 0 or recorded.issuperset(manager.ids_to_funcs):
        manager.shutdown()
        if container.tree_manager is manager:
            container.tree_manager = None


def recorded_functions(device: torch.device) -> frozenset[Hashable]:
    """What torch.compile has recorded on a device so far."""
    manager = _manager(device)
    return frozenset() if manager is None else frozenset(manager.ids_to_funcs)


def unused_in_pools(device: torch.device) -> int:
    """Bytes that are reserved for CUDA graphs and not in use; nobody else can have them."""
    if device.type != "cuda":
        return 0
    number = device.index if device.index is not None else torch.cuda.current_device()
    segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == number]
    return sum(s["total_size"] - s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def _codes() -> Iterator[CodeType]:
    """The code objects that Dynamo has compiled."""
    from torch._dynamo import convert_frame

    for tracker in (convert_frame.input_codes, convert_frame.output_codes):
        for reference in list(tracker.seen):
            code = reference()
            if code is not None:
                yield code


def _entries(code: CodeType) -> list[Any]:
    from torch._dynamo import eval_frame

    ask: Any = getattr(eval_frame, "_debug_get_cache_entry_list", None)
    return list(ask(code)) if ask is not None else []


def _partitioner_of(backend: Any) -> object:
    """The partitioner with which a backend of torch.compile cuts its graphs: Inductor's is told by its settings, ours
    have it as an attribute."""
    settings = getattr(backend, "config", None)
    if isinstance(settings, dict) and "custom_partitioner_fn" in settings:
        return settings["custom_partitioner_fn"]
    return getattr(getattr(backend, "compiler_fn", backend), "partitioner", None)


def _invalidate(entry: Any) -> None:
    """Take an entry out of Dynamo's cache."""
    from torch._dynamo import guards

    deleted: Any = getattr(guards, "DeletedGuardManagerWrapper", None)
    held = getattr(entry.guard_manager, "extra_state", None)
    if deleted is not None and held is not None:
        held.invalidate(entry, deleted("it is compiled by another plan"))


def _container(device: torch.device) -> Any:
    """What torch.compile keeps for the graphs of a device."""
    from torch._inductor import cudagraph_trees

    number = device.index if device.index is not None else torch.cuda.current_device()
    return cudagraph_trees.get_container(number)


def _manager(device: torch.device) -> Any:
    """What records the graphs of a device for torch.compile; none if nothing was recorded."""
    return _container(device).tree_manager if device.type == "cuda" else None


def _nodes(manager: Any) -> Iterator[Any]:
    """All graphs that were recorded."""
    waiting = [node for nodes in (manager.roots or {}).values() for node in nodes]
    while waiting:
        node = waiting.pop()
        waiting += [child for children in node.children.values() for child in children]
        yield node
