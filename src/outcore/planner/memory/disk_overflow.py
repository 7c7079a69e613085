"""What goes on from the host's memory to the disk, and how long that takes.

Where the host has less room than leaves the device, what left first goes on to the disk: backward needs it last. It is
written from the host's memory as soon as it is there, and read back into it as soon as backward has made room.

    device -> host   | a | b | c |      c stays on the host
    host -> disk         | a    | b    |
    disk -> host                          | b    | a    |      as soon as c is back on the device
    host -> device                    | c |      | b |  | a |

Who finds the host's memory full waits until something is written; who needs what is not read yet waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outcore.cost.buffers import Buffer

if TYPE_CHECKING:
    from outcore.planner.memory.copy_schedule import OffloadTarget


def spilled(sizes: Sequence[int], room_bytes: int) -> int:
    """How many of the first must go on, so that the others have room.

    >>> spilled([4, 3, 2, 1], 6), spilled([4, 3], 7)
    (1, 0)
    """
    over, count = sum(sizes) - room_bytes, 0
    while over > 0:
        over -= sizes[count]
        count += 1
    return count


class DiskOverflow:
    """The host's memory and the disk in one step, call after call in the order of time."""

    def __init__(self, leaving: Sequence[Buffer], room_bytes: int, disk: OffloadTarget) -> None:
        self.room_bytes, self.disk = room_bytes, disk
        self.further = {b.name for b in leaving[: spilled([b.bytes for b in leaving], room_bytes)]}
        self.waited_s = 0.0
        """How long copies waited for room on the host."""
        self._held = 0
        self._writing: list[tuple[float, Buffer]] = []
        self._written: dict[str, float] = {}
        self._read_s = self._write_s = 0.0
        self._freed: list[tuple[float, int]] = []
        self._staged = 0

    def admit(self, buffer: Buffer, start_s: float) -> float:
        """When there is room for a buffer that could leave the device at a time."""
        begins = start_s
        while self._writing and (self._held + buffer.bytes > self.room_bytes or self._writing[0][0] <= start_s):
            end_s, first = self._writing.pop(0)
            begins = max(begins, end_s)
            self._held -= first.bytes
        self._held += buffer.bytes
        self.waited_s += begins - start_s
        return begins

    def left(self, buffer: Buffer, end_s: float) -> None:
        """A buffer has arrived on the host; where host memory does not hold it, queue its write to the disk."""
        if buffer.name in self.further:
            self._write_s = max(self._write_s, end_s) + buffer.bytes / self.disk.out_bytes_per_s
            self._writing.append((self._write_s, buffer))
            self._written[buffer.name] = self._write_s

    def turn(self, at_s: float) -> None:
        """Backward begins; what is not written yet still takes its room."""
        self._read_s = at_s
        for end_s, buffer in self._writing:
            self._freed.append((max(at_s, end_s), buffer.bytes))
            self._held -= buffer.bytes
        self._freed.insert(0, (at_s, self.room_bytes - self._held - sum(size for _, size in self._freed)))

    def ready(self, buffer: Buffer) -> float:
        """When a buffer is on the host again, if it was further away."""
        if buffer.name not in self.further:
            return 0.0
        self._staged += buffer.bytes
        room, room_s = 0, 0.0
        for at_s, size in self._freed:
            room, room_s = room + size, max(room_s, at_s)
            if room >= self._staged:
                break
        self._read_s = max(self._read_s, room_s, self._written[buffer.name]) + buffer.bytes / self.disk.in_bytes_per_s
        return self._read_s

    def returned(self, buffer: Buffer, at_s: float) -> None:
        """A buffer is back on the device, and its place on the host free."""
        self._freed.append((at_s, buffer.bytes))
