"""Tensors between GPUs through host memory, for ranks that share a GPU or have no direct way to another.

NCCL refuses two ranks on one device and gloo does not move device memory, so a tensor is copied to pinned memory on one
copy stream, sent from there by gloo, and copied to the other device on another stream. Copies run beside kernels. A
thread waits for the copy out before it offers the bytes, others wait for bytes before they copy them in, so the thread
that issues kernels waits only for what a kernel needs.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from outcore.run.clock import Moment
from outcore.run.wire import Arena, Incoming, Layout, Moved, Outgoing

__all__ = ["StagedWire"]


class _Landing:
    def __init__(self, future: Future[Any], layout: Layout, wire: StagedWire) -> None:
        self._future, self._layout, self._wire = future, layout, wire

    def wait(self) -> torch.Tensor:
        flat, ready = self._future.result()
        stream = torch.cuda.current_stream(flat.device)
        stream.wait_event(ready)
        flat.record_stream(stream)
        return self._layout.view(flat)


class _Leaving:
    def __init__(self, future: Future[Any], done: Moved) -> None:
        self._future = future
        self._done: Moved | None = done

    def ended(self) -> bool:
        if self._done is not None and self._future.done() and self._future.result()[0].is_completed():
            self.finish()
        return self._done is None

    def finish(self) -> None:
        if self._done is None:
            return
        work, began = self._future.result()
        work.wait()
        self._done("send", began, time.perf_counter())
        self._done = None


class StagedWire:
    """Between tensors in device memory, through pinned host memory and gloo."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self.arena = Arena(pinned=True)
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._senders = ThreadPoolExecutor(1, "outcore send")
        self._receivers = ThreadPoolExecutor(4, "outcore receive")
        self._copying: list[tuple[torch.cuda.Event, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, layout: Layout, target: int, tag: int, done: Moved) -> Outgoing:
        """Offer a tensor."""
        flat = layout.flat(tensor).view(torch.uint8)
        host = self.arena.take(layout.nbytes)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            began, ended = _mark(), None
            host.copy_(flat, non_blocking=True)
            ended = _mark()
            flat.record_stream(self._out)
        done("copy out", began, ended)

        def post() -> tuple[Any, float]:
            ended.synchronize()
            return dist.isend(host, dst=target, group=self._group, tag=tag), time.perf_counter()

        return _Leaving(self._senders.submit(post), done)

    def receive(self, layout: Layout, source: int, tag: int, done: Moved) -> Incoming:
        """Provide for a tensor."""
        host = self.arena.take(layout.nbytes)
        posted = time.perf_counter()
        work: Any = dist.irecv(host, src=source, group=self._group, tag=tag)

        def land() -> tuple[torch.Tensor, Moment]:
            work.wait()
            done("receive", posted, time.perf_counter())
            with torch.cuda.device(self._device), torch.cuda.stream(self._in):
                began = _mark()
                flat = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
                flat.copy_(host, non_blocking=True)
                ended = _mark()
            done("copy in", began, ended)
            self._copying.append((ended, host))  # the row must not be used again before the copy is over
            return flat, ended

        return _Landing(self._receivers.submit(land), layout, self)

    def end_step(self) -> None:
        """All transfers of a step are over."""
        for event, _ in self._copying:
            event.synchronize()
        self._copying.clear()
        self.arena.end_step()

    def close(self) -> None:
        """Nothing will be moved any more."""
        self._senders.shutdown(wait=False, cancel_futures=True)
        self._receivers.shutdown(wait=False, cancel_futures=True)
        self._group = None


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
