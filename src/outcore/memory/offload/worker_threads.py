"""Threads that work or wait beside the one that computes, and that Ctrl-C cannot break.

Python raises `KeyboardInterrupt` between any two lines of the main thread. The locks of `concurrent.futures` are
written in Python, and an interrupt between two of their lines leaves one taken for good: the thread that needs it next
hangs, and with it the end of the process. What the main thread shares with a worker is therefore made of parts that are
one operation each: a `SimpleQueue`, and a lock that is taken at birth and released once.

All workers are daemons. Those that copy are waited for when the process ends, because a thread that is stopped in the
middle of a copy would abort it. Those that wait for other ranks are not (`finish=False`): a rank that has failed must
not be kept alive by a transfer that will never end.

Threads do not follow a process that is forked. There others are started; a task that the parent has not finished is
none of the child's, and says so instead of being waited for.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from outcore.errors import OutcoreError

T = TypeVar("T")
Job = TypeVar("Job")
Read = TypeVar("Read")
_PATIENCE_S = 10.0


class WorkerTask(Generic[T]):
    """One call that a worker thread makes, and what came of it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.call: Callable[[], T] | None = call
        self.found: T | None = None
        self.error: BaseException | None = None
        self.over = False
        self.process = os.getpid()
        self.running = threading.Lock()
        self.running.acquire()

    def run(self) -> None:
        """Make the call; only the worker thread runs this."""
        assert self.call is not None
        try:
            self.found = self.call()
        except BaseException as error:
            self.error = error
        self.call, self.over = None, True  # what it holds is let go of
        self.running.release()

    def wait(self, most_s: float = -1) -> None:
        """Wait until the call is over, whether it returned or raised, or until `most_s` seconds have passed; in a
        process that was forked since it was submitted it never will be."""
        if self.process != os.getpid():
            return
        if not self.over and self.running.acquire(timeout=most_s):
            self.running.release()

    def result(self, most_s: float = -1) -> T:
        """What the call returned; what it raised is raised here.

        Raises:
            TimeoutError: it was not over after so long.
        """
        self.wait(most_s)
        if self.process != os.getpid():
            raise OutcoreError(
                "this process was forked between a forward and its backward, and what was offloaded then is the "
                "parent's; run forward and backward in one process"
            )
        if not self.over:
            raise TimeoutError
        if self.error is not None:
            raise self.error
        return self.found  # type: ignore[return-value]  # over without an error


class WorkerThreads:
    """A few threads, started when there is something to do; they do not keep a process from ending.

    Args:
        count: how many.
        name: of each.
        finish: whether the end of the process waits a while for what they have to do.
    """

    def __init__(self, count: int, name: str, *, finish: bool = True) -> None:
        self.count, self.name = count, name
        self.queue: SimpleQueue[WorkerTask[Any] | None] = SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.process = os.getpid()
        if finish:
            _WORKING.add(self)

    def submit(self, function: Callable[..., T], *args: Any) -> WorkerTask[T]:
        """Have a call made, after those that were handed over before."""
        task = WorkerTask(lambda: function(*args))
        if self.process != task.process:
            self.queue, self.threads, self.process = SimpleQueue(), [], task.process
        while len(self.threads) < self.count:
            thread = threading.Thread(target=_work, args=(self.queue,), name=self.name, daemon=True)
            thread.start()
            self.threads.append(thread)
        self.queue.put(task)
        return task

    def close(self, most_s: float | None = None) -> None:
        """Finish what was handed over; wait so long for it, or until it is done."""
        fresh: SimpleQueue[WorkerTask[Any] | None] = SimpleQueue()
        (queue, threads), (self.queue, self.threads) = (self.queue, self.threads), (fresh, [])
        queue.put(None)
        for thread in threads:
            thread.join(most_s)

    def cancel(self) -> None:
        """Forget what no thread has begun, and finish the rest."""
        try:
            while True:
                self.queue.get_nowait()
        except Empty:
            self.close()


_WORKING: weakref.WeakSet[WorkerThreads] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """The process ends: a thread that is stopped in the middle of a copy would abort it."""
    for threads in list(_WORKING):
        threads.close(_PATIENCE_S)


def _work(queue: SimpleQueue[WorkerTask[Any] | None]) -> None:
    while (task := queue.get()) is not None:
        task.run()
        del task  # or its result would be held until the next one comes
    queue.put(None)  # for the others: Ctrl-C may have left one that nobody counts


def read_ahead(jobs: Iterable[Job], read: Callable[[Job], Read], workers: int) -> Iterator[tuple[Job, Read]]:
    """Prefetch: each job with what was read for it, in order, while threads read for the next ones.

    At most one job more than there are workers is being read or waits to be taken.
    """
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
