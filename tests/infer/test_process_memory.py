"""The most that a process holds is seen while it holds it."""

from __future__ import annotations

import mmap
import time

import pytest

from outcore.infer.process_memory import ProcessMemory, anonymous_bytes

MIB = 2**20


@pytest.mark.skipif(anonymous_bytes() is None, reason="the system does not say what a process holds")
def test_what_was_held_inside_and_let_go_of_is_the_peak() -> None:
    with ProcessMemory() as held:
        large = mmap.mmap(
            -1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )  # pages of its own, whatever the allocator has left over
        large.write(bytes(64 * MIB))
        end = time.monotonic() + 20
        while (held.peak_bytes or 0) < (held.before_bytes or 0) + 48 * MIB and time.monotonic() < end:
            time.sleep(0.02)
        large.close()
    assert held.peak_bytes is not None and held.before_bytes is not None
    assert held.peak_bytes >= held.before_bytes + 48 * MIB
