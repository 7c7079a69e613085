"""How fast a device copies to its host and disk, measured in a fraction of a second, whatever limit of memory the
process has set for itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from outcore.machine.clock import wall_s
from outcore.memory.cuda_graphs.pool import without_limit
from outcore.memory.offload.backends import DiskBackend, HostBackend
from outcore.memory.offload.host_limit import host_limit_bytes
from outcore.memory.offload.scratch_file import ScratchFile
from outcore.planner.memory.copy_schedule import OffloadTarget

_PROBE_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}


@cache
def measured_tier(device: torch.device) -> OffloadTarget:
    """The backend for a device with its measured rates."""
    size = _PROBE_BYTES[device.type]
    if device.type == "cuda":
        with without_limit(device):
            return _measured_host(device, size)
    tier, flat = DiskBackend(size), torch.ones(size, dtype=torch.uint8, device="cpu")
    start = time.perf_counter()
    buffer = tier.evict(flat)
    buffer.wait_out()
    middle = time.perf_counter()
    buffer.bytes_back()
    end = time.perf_counter()
    del buffer
    tier.close()
    return OffloadTarget(size / (middle - start), size / (end - middle), least_bytes=2**16)


def _measured_host(device: torch.device, size: int) -> OffloadTarget:
    below = HostBackend(device, size)  # the very kind of memory that buffers will go to
    host, there = below.memory, torch.empty(size, dtype=torch.uint8, device=device)
    there.copy_(host)
    out, back = _fastest_s(lambda: host.copy_(there), device), _fastest_s(lambda: there.copy_(host), device)
    below.close()
    # Both ways at once share the bus a little, and kernels share the memory with the copies.
    return OffloadTarget(0.85 * size / out, 0.85 * size / back)


def tier_below(device: torch.device, most_bytes: int, *, spills: bool) -> OffloadTarget:
    """The backend for a device for a step that offloads at most `most_bytes`; `spills` says whether what has no room on
    the host may be written on to the disk."""
    tier = measured_tier(device)
    if device.type != "cuda" or most_bytes <= (room := host_limit_bytes()):
        return tier
    return replace(tier, capacity_bytes=room, beyond=measured_disk() if spills else None)


@cache
def measured_disk() -> OffloadTarget:
    """The rates of the disk behind a full host memory: of a file that is really written to it, and read after the
    system's cache has dropped it."""
    size = 4 * _PROBE_BYTES["cpu"]
    scratch, flat = ScratchFile(size), torch.ones(size, dtype=torch.uint8, device="cpu")
    place = scratch.take(size)
    start = time.perf_counter()
    scratch.write(flat, place)
    os.fdatasync(scratch.file)
    middle = time.perf_counter()
    os.posix_fadvise(scratch.file, 0, size, os.POSIX_FADV_DONTNEED)
    scratch.read(flat, place)
    end = time.perf_counter()
    scratch.close()
    return OffloadTarget(size / (middle - start), size / (end - middle))


@cache
def memory_rate(device: torch.device) -> float:
    """Bytes per second that a device reads and writes in its own memory."""
    with without_limit(device):
        return _copy_rate(device)


def _copy_rate(device: torch.device) -> float:
    a = torch.empty(_PROBE_BYTES[device.type] // 4, device=device)
    b = torch.empty_like(a)
    b.copy_(a)
    return 2 * a.nbytes / _fastest_s(lambda: b.copy_(a), device)


def _fastest_s(run: Callable[[], object], device: torch.device) -> float:
    return min(wall_s(run, device) for _ in range(3))
