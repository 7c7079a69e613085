"""Threads that copy beside the computing, and that Ctrl-C cannot break.

Python raises `KeyboardInterrupt` between any two lines of the main thread. The locks of `concurrent.futures` are
written in Python, and an interrupt between two of their lines leaves one taken for good: the thread that needs it next
hangs, and with it the end of the process. What the main thread shares with a copy thread is therefore made of parts
that are one operation each: a `SimpleQueue`, and a lock that is taken at birth and released once.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

__all__ = ["CopyTask", "CopyThreads"]

T = TypeVar("T")
_EXIT_WAIT_S = 10.0


class CopyTask(Generic[T]):
    """One call on a copy thread."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.call: Callable[[], T] | None = call
        self.found: T | None = None
        self.error: BaseException | None = None
        self.over = False
        self.running = threading.Lock()
        self.running.acquire()

    def run(self) -> None:
        """Run the call, on the copy thread."""
        assert self.call is not None
        try:
            self.found = self.call()
        except BaseException as error:
            self.error = error
        self.call, self.over = None, True  # drop what the call refers to
        self.running.release()

    def wait(self) -> None:
        """Wait until it is over, whether it raised or not."""
        if not self.over:
            with self.running:
                pass

    def result(self) -> T:
        """What the call returned; what it raised is raised here."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self.found  # type: ignore[return-value]  # over without an error


class CopyThreads:
    """A few threads, started when there is something to do; they do not keep a process from ending."""

    def __init__(self, count: int, name: str) -> None:
        self.count, self.name = count, name
        self.queue: SimpleQueue[CopyTask[Any] | None] = SimpleQueue()
        self.threads: list[threading.Thread] = []
        _WORKING.add(self)

    def submit(self, function: Callable[..., T], *args: Any) -> CopyTask[T]:
        """Enqueue a call after those that were submitted before."""
        copy_task = CopyTask(lambda: function(*args))
        while len(self.threads) < self.count:
            thread = threading.Thread(target=_work, args=(self.queue,), name=self.name, daemon=True)
            thread.start()
            self.threads.append(thread)
        self.queue.put(copy_task)
        return copy_task

    def close(self, most_s: float | None = None) -> None:
        """Finish what was submitted; wait at most `most_s` for each thread, or until it is done."""
        fresh: SimpleQueue[CopyTask[Any] | None] = SimpleQueue()
        (queue, threads), (self.queue, self.threads) = (self.queue, self.threads), (fresh, [])
        queue.put(None)
        for thread in threads:
            thread.join(most_s)


_WORKING: weakref.WeakSet[CopyThreads] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """Join the threads when the process ends: one that is stopped in the middle of a copy would abort it."""
    for copy_threads in list(_WORKING):
        copy_threads.close(_EXIT_WAIT_S)


def _work(queue: SimpleQueue[CopyTask[Any] | None]) -> None:
    while (copy_task := queue.get()) is not None:
        copy_task.run()
        del copy_task  # or its result would be held until the next one comes
    queue.put(None)  # for the others: Ctrl-C may have left one that nobody counts
