"""Threads beside the computing: in order, with their errors, and whole after any number of interrupts."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from outcore.memory.offload.worker_threads import WorkerThreads


def test_calls_are_made_in_order_and_tell_what_they_found() -> None:
    threads, seen = WorkerThreads(1, "test"), []
    tasks = [threads.submit(seen.append, i) for i in range(100)]
    assert threads.submit(divmod, 7, 2).result() == (3, 1)
    assert seen == list(range(100)) and all(task.over for task in tasks)
    failed = threads.submit(divmod, 7, 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failed.result()
    threads.close()


def test_closing_waits_for_what_was_handed_over_and_threads_come_back() -> None:
    threads, seen = WorkerThreads(2, "test"), []
    for i in range(4):
        threads.submit(lambda i=i: (time.sleep(0.02), seen.append(i)))
    threads.close()
    assert sorted(seen) == [0, 1, 2, 3] and not threads.threads
    assert threads.submit(str, 5).result() == "5"
    threads.close()


def test_a_thread_that_nobody_counts_ends_with_the_others() -> None:
    for _ in range(20):
        threads = WorkerThreads(2, "test")
        threads.submit(str, 1).result()
        uncounted = threads.threads.pop(0)  # as when Ctrl-C comes between its start and its place in the list
        threads.submit(str, 2).result()
        threads.close(most_s=20.0)
        uncounted.join(20.0)
        assert not uncounted.is_alive() and not threads.threads


def test_what_was_not_begun_can_be_forgotten() -> None:
    threads, seen, gate = WorkerThreads(1, "test"), [], threading.Lock()
    gate.acquire()
    begun = threads.submit(lambda: (gate.acquire(), seen.append(0)))
    with pytest.raises(TimeoutError):
        begun.result(0.01)
    later = [threads.submit(seen.append, i) for i in range(1, 50)]
    threading.Timer(0.05, gate.release).start()
    threads.cancel()
    assert seen == [0] and begun.over and not any(task.over for task in later)


def test_interrupts_at_any_line_break_nothing() -> None:
    threads, draw, interrupts = WorkerThreads(2, "test"), random.Random(0), 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 2e-3))
                while True:
                    threads.submit(str, 1).result()
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts == 300
    assert [threads.submit(str, i).result() for i in range(3)] == ["0", "1", "2"]
    threads.close()


def test_a_process_does_not_wait_for_what_may_never_end() -> None:
    code = """
import threading
from outcore.memory.offload.worker_threads import WorkerThreads
never = threading.Lock()
never.acquire()
WorkerThreads(1, "waits", finish=False).submit(never.acquire)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_ends_well_while_something_is_being_copied() -> None:
    code = """
import torch
from outcore.memory.offload.worker_threads import WorkerThreads
a, b = torch.zeros(2**18), torch.ones(2**18)
threads = WorkerThreads(1, "copies")
for _ in range(3000):
    threads.submit(a.copy_, b)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
