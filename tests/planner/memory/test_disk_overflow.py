"""Host memory that is too small: what left first goes on to the disk, in time with what comes back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.cost.buffers import Buffer
from outcore.planner.memory.copy_schedule import OffloadTarget, schedule_transfers
from outcore.planner.memory.disk_overflow import DiskOverflow

DISK = OffloadTarget(out_bytes_per_s=1.0, in_bytes_per_s=2.0)


def buffer(name: str, size: int) -> Buffer:
    return Buffer(name, "value", size, 4, 0, 0, 0, {})


A, B, C = buffer("a", 4), buffer("b", 3), buffer("c", 2)


def test_what_left_first_is_written_and_what_comes_next_waits_for_its_room() -> None:
    """Worked out by hand: the host holds 4 bytes, writes one a second and reads two."""
    host = DiskOverflow([A, B, C], 4, DISK)
    assert host.further == {"a", "b"}
    assert host.admit(A, 1.0) == 1.0
    host.left(A, 2.0)  # written until 6
    assert host.admit(B, 2.0) == 6.0
    host.left(B, 7.0)  # until 10
    assert host.admit(C, 7.0) == 10.0
    host.left(C, 11.0)  # stays
    assert host.waited_s == 4.0 + 3.0

    host.turn(12.0)  # 2 of 4 bytes are free
    assert host.ready(C) == 0.0
    host.returned(C, 13.0)
    assert host.ready(B) == 13.0 + 3 / 2
    host.returned(B, 15.0)
    assert host.ready(A) == 15.0 + 4 / 2


def test_the_disk_writes_one_after_the_other() -> None:
    host = DiskOverflow([A, B, C], 0, DISK)
    host.left(A, 2.0)
    host.left(B, 3.0)  # the disk is busy until 6
    host.turn(4.0)
    assert host.ready(A) >= 6.0 + 4 / 2
    assert host.ready(B) >= 9.0 + 3 / 2


def test_what_is_still_being_written_when_backward_begins_takes_its_room() -> None:
    host = DiskOverflow([A, B, C], 4, DISK)
    host.admit(A, 1.0)
    host.left(A, 2.0)
    host.admit(B, 2.0)
    host.left(B, 7.0)
    host.turn(8.0)  # one byte is free, three are at 10
    assert host.ready(B) == 10.0 + 3 / 2


def test_who_comes_when_there_is_room_does_not_wait() -> None:
    host = DiskOverflow([A, B, C], 5, DISK)
    assert host.further == {"a"}
    host.admit(A, 0.0)
    host.left(A, 1.0)  # until 5
    assert host.admit(B, 5.0) == 5.0
    assert host.admit(C, 5.5) == 5.5 and host.waited_s == 0.0


def test_copies_of_a_step_wait_for_the_room_that_others_make_on_the_host() -> None:
    """Worked out by hand: three calls of a second each way, no time to leave, a second for each byte to come back.

    The disk has taken a at 5 and b at 8, when c leaves: backward begins six seconds late, at 9. c is back at 11, and
    its room is where b is read into, until 12.5; b is back at 15.5, a is read until 17.5 and back at 21.5.
    """
    step: Any = SimpleNamespace(
        forward_ends=[1.0, 2.0, 3.0],
        backward_s=[1.0, 1.0, 1.0],
        order=["0", "1", "2"],
        differentiated=[0, 1, 2],
        forward_at=[0, 1, 2],
        backward_at=[5, 4, 3],
    )
    moved = [(replace(b, last=n), n) for n, b in enumerate((A, B, C))]
    found = schedule_transfers(step, moved, {}, OffloadTarget(1e18, 1.0, 4, beyond=DISK))
    assert found.stall_s == pytest.approx(6.0 + (21.5 - 11.0)) and (found.bytes, found.further_bytes) == (9, 7)
    assert [(copies.buffer, copies.fetch) for copies in found.moved] == [("c", 2), ("b", 1), ("a", 0)]
    assert schedule_transfers(step, moved, {}, OffloadTarget(1e18, 1.0, 4)).stall_s == float("inf")
