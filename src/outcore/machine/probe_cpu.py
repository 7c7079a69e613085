"""Measuring a CPU and its disk.

Each function measures one thing in a fraction of a second and returns one number. Rates are those of the best
run: other programs can only slow a machine down, so the best run is the one that tells most about the
hardware.

The disk is measured where outcore would put values that do not fit in memory. Writing ends with `fsync`, and
the page cache is asked to forget the file before it is read back, else the "disk" would be memory.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

import torch

from outcore.errors import MachineError
from outcore.machine.clock import time_calls

__all__ = [
    "TORCH_DTYPES",
    "cpu_cores",
    "cpu_memory_bytes",
    "cpu_name",
    "measure_copy",
    "measure_disk",
    "measure_dispatch",
    "measure_matmul",
]

TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

_BLOCK = 8 << 20


def cpu_name() -> str:
    """The processor's model name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    import platform

    return platform.processor() or platform.machine() or "CPU"


def cpu_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_clock_hz() -> float | None:
    """The clock the system reports, if it does."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("cpu MHz"):
                return float(line.partition(":")[2]) * 1e6
    return None


def cpu_memory_bytes() -> int:
    """Physical memory, or the limit of the container if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            physical = min(physical, int(Path(path).read_text(encoding="utf-8")))
    return physical


def measure_copy(*, nbytes: int = 256 << 20, seconds: float = 0.5) -> float:
    """Bytes read plus written per second by a copy that no cache holds."""
    source = torch.ones(nbytes // 4, device="cpu")
    target = torch.empty_like(source)
    # One thread: its own time, which others on a busy computer do not lengthen.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    return 2 * nbytes / time_calls(lambda: target.copy_(source), "cpu", seconds=seconds, clock=clock).min_s


def measure_matmul(precision: str, *, seconds: float = 0.6) -> float | None:
    """FLOP/s of a square matrix product; None where torch has no such product on this CPU.

    The size grows until one product takes a twentieth of a second, so that a slow machine stays quick.
    """
    dtype = TORCH_DTYPES[precision]
    best = 0.0
    for size in (256, 512, 1024, 2048, 4096):
        a = torch.randn(size, size, device="cpu").to(dtype)
        try:
            timing = time_calls(lambda a=a: a @ a, "cpu", seconds=seconds / 3, warmup=1, least=1)  # type: ignore[misc]
        except RuntimeError:
            return None
        best = max(best, 2 * size**3 / timing.min_s)
        if timing.min_s > 0.05:
            break
    return best


def measure_dispatch(*, seconds: float = 0.2) -> float:
    """Seconds the interpreter and torch need to issue one small operation."""
    x = torch.ones(1, device="cpu")

    def hundred() -> None:
        for _ in range(100):
            x.add(1.0)

    return time_calls(hundred, "cpu", seconds=seconds).min_s / 100


def measure_disk(directory: Path, *, nbytes: int = 256 << 20, seconds: float = 1.5) -> tuple[float, float]:
    """Bytes per second written to and read from a file in `directory`: (write, read)."""
    directory.mkdir(parents=True, exist_ok=True)
    free = os.statvfs(directory)
    nbytes = min(nbytes, free.f_bavail * free.f_frsize // 8)
    if nbytes < _BLOCK:
        raise MachineError(f"{nbytes} bytes may be used in {directory}; needed {_BLOCK} to measure the disk")
    block = os.urandom(_BLOCK)  # random, so that a compressing file system does not flatter itself
    with tempfile.NamedTemporaryFile(dir=directory, prefix="outcore-disk-") as file:
        descriptor = file.fileno()
        written, start = 0, time.perf_counter()
        while written < nbytes and (time.perf_counter() - start < seconds or written == 0):
            written += os.write(descriptor, block)
        os.fsync(descriptor)
        write = written / (time.perf_counter() - start)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        buffer = bytearray(_BLOCK)
        read, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds and (got := os.readv(descriptor, [buffer])):
            read += got
        return write, max(read, 1) / (time.perf_counter() - start)
