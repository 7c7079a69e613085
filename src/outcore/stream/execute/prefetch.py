"""Prefetching: while one tile is computed, the next are read, decoded and copied to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from outcore.memory.offload.worker_threads import WorkerTask, WorkerThreads

__all__ = ["read_ahead"]

Job = TypeVar("Job")
Read = TypeVar("Read")


def read_ahead(jobs: Iterable[Job], read: Callable[[Job], Read], workers: int) -> Iterator[tuple[Job, Read]]:
    """Each job with what was read for it, in order; at most one tile more than workers is held or being read."""
    if workers == 0:
        for job in jobs:
            yield job, read(job)
        return
    pool = WorkerThreads(workers, "outcore-read")
    waiting: deque[tuple[Job, WorkerTask[Read]]] = deque()
    try:
        for job in jobs:
            waiting.append((job, pool.submit(read, job)))
            if len(waiting) > workers:
                first, task = waiting.popleft()
                yield first, task.result()
        while waiting:
            first, task = waiting.popleft()
            yield first, task.result()
    finally:
        pool.cancel()
