"""Measuring a GPU and its link to the host.

The same numbers as for a CPU, plus what only a second memory has: copies to and from pinned and pageable host
memory, each way alone and both ways at once on two streams. Nothing here changes the card's clocks or
settings.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from outcore.machine.clock import TimedRuns, tf32, time_calls, wall_s
from outcore.machine.link import HostLink, Link
from outcore.machine.probe_cpu import TORCH_DTYPES

__all__ = [
    "measure_cuda_copy",
    "measure_cuda_dispatch",
    "measure_cuda_matmul",
    "measure_host_link",
    "measure_launch",
]


def measure_cuda_matmul(device: torch.device, precision: str, *, seconds: float = 0.3) -> float | None:
    """FLOP/s of a square matrix product on random numbers; None where the card or torch has none."""
    best = 0.0
    with tf32(precision == "tf32"):
        for size in (2048, 4096, 8192):
            try:
                a = torch.randn(size, size, device=device).to(TORCH_DTYPES[precision])
                timing = time_calls(lambda a=a: a @ a, device, seconds=seconds / 3)  # type: ignore[misc]
            except RuntimeError:
                return best or None
            best = max(best, 2 * size**3 / timing.median_s)
            if timing.median_s > 0.05:
                break
    return best


def measure_cuda_copy(device: torch.device, *, seconds: float = 0.2) -> float:
    """Bytes read plus written per second by a copy within the device's memory."""
    free, _ = torch.cuda.mem_get_info(device)
    nbytes = min(4 << 30, free // 4)
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / time_calls(lambda: target.copy_(source), device, seconds=seconds).median_s


def measure_launch(device: torch.device) -> float:
    """Seconds from one tiny kernel to the next on the device, when all are already issued."""
    return _fifty_tiny_kernels(device).min_s / 50


def measure_cuda_dispatch(device: torch.device) -> float:
    """Seconds the host needs to issue one small operation to the device."""
    return _fifty_tiny_kernels(device).dispatch_s / 50


def _fifty_tiny_kernels(device: torch.device) -> TimedRuns:
    x = torch.ones(1, device=device)

    def fifty() -> None:
        for _ in range(50):
            x.add_(1.0)

    return time_calls(fifty, device, seconds=0.05)


def measure_host_link(device: torch.device, *, nbytes: int = 256 << 20) -> HostLink:
    """Rates of copies between the device and host memory, pinned and pageable."""
    return HostLink(
        pinned=_measure_link(device, nbytes, pinned=True),
        pageable=_measure_link(device, nbytes // 4, pinned=False),
    )


def _measure_link(device: torch.device, nbytes: int, *, pinned: bool) -> Link:
    host_away = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned, device="cpu")
    host_back = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned, device="cpu")
    there_away = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    there_back = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    small = torch.zeros(1, dtype=torch.uint8, pin_memory=pinned, device="cpu")

    def best(call: Callable[[], object], repeats: int = 4) -> float:
        return min([wall_s(call, device) for _ in range(repeats)][1:])

    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            host_away.copy_(there_away, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            there_back.copy_(host_back, non_blocking=True)

    latency = best(lambda: there_away[:1].copy_(small, non_blocking=True), repeats=20)
    return Link(
        away_bytes_per_s=nbytes / best(lambda: host_away.copy_(there_away, non_blocking=True)),
        back_bytes_per_s=nbytes / best(lambda: there_back.copy_(host_back, non_blocking=True)),
        both_bytes_per_s=2 * nbytes / best(both),
        latency_s=latency,
    )
