"""The memory of a pair of CUDA graphs.

Graphs have memory of their own, which stays reserved as long as they live; so what counts is not the bytes of their
tensors at the peak but what the allocator once reserved for them. Three things make that little more than the peak:
expandable segments instead of segments of fixed size, whose holes fit nothing else; one stream for warming up and for
capturing, because libraries keep a workspace for every stream they have seen; and giving these workspaces back before
and after a capture, so that the graphs' own is in their memory, where the next graph can use it again, and after every
call in it, because a workspace that stays is there throughout, from the first product on, and in the way of larger
blocks. Whoever needs one next takes it again, which costs nothing when a graph runs.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from outcore.memory.offload.backends import HostBackend


class GraphPool:
    """Captures graphs one after the other into one memory pool."""

    _streams: dict[torch.device, torch.cuda.Stream] = {}  # noqa: RUF012  # one for the process: each brings workspaces

    def __init__(self, device: torch.device, tier: HostBackend | None = None, handle: Any = None) -> None:
        self.device, self.tier = device, tier
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self.stream = self._streams[device]
        self.handle = handle
        """Of the pool, which other graphs may use too."""

    def fresh(self) -> GraphPool:
        """Another pool, on the same stream."""
        return GraphPool(self.device, self.tier)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Run something on the stream of the captures, ordered after all work before and before all work after."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    @contextlib.contextmanager
    def recorded(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture what is run into a graph; copies that it starts are over when it is."""
        handle = self.handle if self.handle is not None else torch.cuda.graph_pool_handle()
        current, generator = torch.cuda.current_stream(self.device), _generator(self.device)
        before = generator.clone_state()
        try:
            with torch.cuda.graph(graph, stream=self.stream, pool=handle):
                sides = (self.tier.out, self.tier.back) if self.tier is not None else ()
                for side in sides:
                    side.wait_stream(self.stream)
                yield
                for side in sides:
                    self.stream.wait_stream(side)
        except BaseException:  # torch leaves all three as they are in a capture
            torch.cuda.set_stream(current)
            generator.graphsafe_set_state(before)
            _abandon(self.device, handle)
            raise
        if self.tier is not None:
            self.tier.settle()
        self.handle = graph.pool()

    @property
    def bytes(self) -> int:
        """Bytes that the graphs have reserved."""
        return sum(s["total_size"] for s in self.segments())

    def segments(self) -> Sequence[dict[str, Any]]:
        """The segments of the pool."""
        if self.handle is None:
            return []
        return [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(self.handle)]


def _abandon(device: torch.device, handle: Any) -> None:
    """Have what a capture that failed has taken from the device given back with everything else that is unused."""
    number = device.index if device.index is not None else torch.cuda.current_device()
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        with contextlib.suppress(RuntimeError, AttributeError):
            getattr(torch._C, name)(number, handle)


def _generator(device: torch.device) -> torch.Generator:
    """The random generator of a device."""
    return torch.cuda.default_generators[device.index if device.index is not None else torch.cuda.current_device()]


@contextlib.contextmanager
def growing_segments() -> Iterator[None]:
    """Let the allocator use expandable segments; afterwards as the user has configured it."""
    if _stays or not _expandable_segments(on=True):
        yield
        return
    try:
        yield
    finally:
        _expandable_segments(on=False)


_stays = False
"""Whether expandable segments are on for good."""


def grow_segments_from_now_on() -> None:
    """Let the allocator use expandable segments, unless the user has configured it.

    Blocks of many sizes that come and go, as under a plan, leave holes in segments of fixed sizes: up to two thirds
    more than what is allocated was reserved so.
    """
    global _stays
    if not _stays and _expandable_segments(on=True):
        _stays = True
        torch.cuda.empty_cache()  # what is there already lies in segments of the other kind


def _expandable_segments(*, on: bool) -> bool:
    """Configure the allocator; returns False if the user has configured this."""
    configured = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments" in configured or "backend" in configured:
        return False
    tell: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if tell is None:  # as it was called before
        tell = torch.cuda.memory._set_allocator_settings
    tell(",".join(filter(None, (configured, f"expandable_segments:{on}"))))
    return True


@contextlib.contextmanager
def without_limit(device: torch.device) -> Iterator[None]:
    """Without the limit that the process has set for itself on a device, which holds again afterwards."""
    ask: Any = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    share = ask(device) if ask is not None and device.type == "cuda" else 1.0
    if share >= 1:
        yield
        return
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    try:
        yield
    finally:
        give_back()
        torch.cuda.set_per_process_memory_fraction(share, device)


def give_back(*, collect: bool = True) -> None:
    """Return unused memory to the device, the workspaces of libraries included; what waits for Python's collector too,
    if that is to be run, which may take half a second."""
    if collect:
        gc.collect()
    without_workspaces()
    torch.cuda.empty_cache()


def without_workspaces() -> None:
    """Let libraries give their workspaces back to the allocator."""
    clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
