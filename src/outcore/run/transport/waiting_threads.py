"""Threads that wait, so that the one that computes need not.

gloo says that a transfer is over only to who waits for it. The threads are daemons: a rank that has failed must not be
kept alive by a transfer that will never end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

__all__ = ["WaitingThreads"]


class WaitingThreads:
    """Runs tasks in the order given, on one thread or several."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._queue,), name=f"outcore {name}", daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def do(self, task: Callable[[], Any]) -> Future[Any]:
        """Submit a task; the future has its result, or what it raised."""
        future: Future[Any] = Future()
        self._queue.put((future, task))
        return future

    def close(self) -> None:
        """Let the threads end when their tasks are done."""
        for _ in self._threads:
            self._queue.put(None)


def _work(queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (entry := queue.get()) is not None:
        future, task = entry
        try:
            result = task()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
            del result
        del entry, future, task  # what was sent must not live until the next task
