"""Threads that copy: in order, with their errors, and whole after any number of interrupts."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time

import pytest

from outcore.memory.offload.copy_threads import CopyThreads


def test_calls_are_made_in_order_and_tell_what_they_found() -> None:
    copy_threads, seen = CopyThreads(1, "test"), []
    copy_tasks = [copy_threads.submit(seen.append, i) for i in range(100)]
    assert copy_threads.submit(divmod, 7, 2).result() == (3, 1)
    assert seen == list(range(100)) and all(copy_task.over for copy_task in copy_tasks)
    failed = copy_threads.submit(divmod, 7, 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failed.result()
    copy_threads.close()


def test_closing_waits_for_what_was_handed_over_and_threads_come_back() -> None:
    copy_threads, seen = CopyThreads(2, "test"), []
    for i in range(4):
        copy_threads.submit(lambda i=i: (time.sleep(0.02), seen.append(i)))
    copy_threads.close()
    assert sorted(seen) == [0, 1, 2, 3] and not copy_threads.threads
    assert copy_threads.submit(str, 5).result() == "5"
    copy_threads.close()


def test_a_thread_that_nobody_counts_ends_with_the_others() -> None:
    for _ in range(20):
        copy_threads = CopyThreads(2, "test")
        copy_threads.submit(str, 1).result()
        uncounted = copy_threads.threads.pop(0)  # as when Ctrl-C comes between its start and its place in the list
        copy_threads.submit(str, 2).result()
        copy_threads.close(most_s=20.0)
        uncounted.join(20.0)
        assert not uncounted.is_alive() and not copy_threads.threads


def test_interrupts_at_any_line_break_nothing() -> None:
    copy_threads, draw, interrupts = CopyThreads(2, "test"), random.Random(0), 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 2e-3))
                while True:
                    copy_threads.submit(str, 1).result()
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts == 300
    assert [copy_threads.submit(str, i).result() for i in range(3)] == ["0", "1", "2"]
    copy_threads.close()


def test_a_process_ends_well_while_something_is_being_copied() -> None:
    code = """
import torch
from outcore.memory.offload.copy_threads import CopyThreads
a, b = torch.zeros(2**18), torch.ones(2**18)
copy_threads = CopyThreads(1, "copies")
for _ in range(3000):
    copy_threads.submit(a.copy_, b)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
