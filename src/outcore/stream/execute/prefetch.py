"""Prefetching: while one tile is computed, the next are read, decoded and copied to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["read_ahead"]

Job = TypeVar("Job")
Read = TypeVar("Read")


def read_ahead(jobs: Iterable[Job], read: Callable[[Job], Read], workers: int) -> Iterator[tuple[Job, Read]]:
    """Each job with what was read for it, in order; at most one tile more than workers is held or being read."""
    if workers == 0:
        for job in jobs:
            yield job, read(job)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="outcore-read")
    waiting: deque[tuple[Job, Future[Read]]] = deque()
    try:
        for job in jobs:
            waiting.append((job, pool.submit(read, job)))
            if len(waiting) > workers:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
