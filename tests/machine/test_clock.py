"""What a host takes to issue a call, of runs some of which waited for room in a device's queue."""

from __future__ import annotations

import pytest

from outcore.machine.clock import _issue_s


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
