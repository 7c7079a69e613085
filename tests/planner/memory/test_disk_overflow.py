"""Host memory that is too small: what left first goes on to the disk, in time with what comes back."""

from __future__ import annotations

from outcore.cost.buffers import Buffer
from outcore.planner.memory.copy_schedule import OffloadTarget
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
