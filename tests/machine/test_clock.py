"""Which of several timed runs count: not those that waited for a device's queue, nor those given new memory."""

from __future__ import annotations

import mmap

import pytest

from outcore.machine.clock import _issue_s, time_calls


@pytest.mark.parametrize(
    ("issued", "alone", "expected"),
    [
        ([30e-6, 31e-6, 29e-6, 80e-6], 45e-6, 30.5e-6),  # the usual case: what runs take in the middle
        ([30e-6, 32e-6, 20e-3, 21e-3, 22e-3], 40e-6, 30e-6),  # the queue filled up after two
        ([20e-3, 21e-3, 22e-3], 40e-6, 40e-6),  # it was full from the first on
        ([5e-3, 5.2e-3, 4.9e-3], 5.1e-3, 5e-3),  # a call that keeps the host busy is no wait
    ],
)
def test_waits_for_room_in_a_queue_are_not_the_hosts_time(issued: list[float], alone: float, expected: float) -> None:
    assert _issue_s(issued, alone) == pytest.approx(expected)


def test_runs_that_were_given_new_memory_by_the_system_do_not_count() -> None:
    """The heap grows in the first runs of a large operation; a step finds the memory of the step before."""
    taken: list[mmap.mmap] = []

    def call() -> None:
        if len(taken) < 6:
            taken.append(mmap.mmap(-1, 200 * mmap.PAGESIZE))
            taken[-1].write(b"x" * len(taken[-1]))

    timing = time_calls(call, "cpu", seconds=1e9, warmup=2, most=10)
    assert timing.runs == 10 - (6 - 2)


def test_runs_that_are_all_given_new_memory_count() -> None:
    def call() -> None:
        with mmap.mmap(-1, 200 * mmap.PAGESIZE) as memory:
            memory.write(b"x" * len(memory))

    assert time_calls(call, "cpu", seconds=1e9, warmup=1, most=8).runs == 8
