"""Tensors between GPUs through host memory, for ranks that share a GPU or have no direct link to another.

NCCL refuses two ranks on one device and gloo does not move device memory, so a tensor is copied to pinned memory on one
copy stream, sent from there, and copied to the other device on another stream. Between ranks of one host the pinned
memory is shared (`SharedRows`): what one copied out the other copies in, and a pipe carries the name of the row;
between hosts gloo carries the bytes. Copies run beside kernels. A thread waits for the copy out before it sends the
name, others wait for a name before they copy in, so the thread that launches kernels waits only for what a kernel
needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from outcore.memory.offload.worker_threads import WorkerTask, WorkerThreads
from outcore.run.engine.step_meters import Moment
from outcore.run.transport.p2p import HostRows, IncomingTensor, Moved, OutgoingTensor, SentTensor, TensorLayout
from outcore.run.transport.shared_memory import SharedRows
from outcore.run.transport.watched_wait import WatchedWait


class _Landing:
    def __init__(self, task: WorkerTask[Any], layout: TensorLayout, watched_wait: WatchedWait) -> None:
        self._task, self._layout, self._watched_wait = task, layout, watched_wait

    def wait(self) -> torch.Tensor:
        flat, ready = self._watched_wait.result(self._task)
        stream = torch.cuda.current_stream(flat.device)
        stream.wait_event(ready)
        flat.record_stream(stream)
        return self._layout.view(flat)


class StagedPointToPoint:
    """Between tensors in device memory, through pinned host memory and gloo."""

    def __init__(self, group: Any, shared_rows: SharedRows, device: torch.device, watched_wait: WatchedWait) -> None:
        self._group, self.shared_rows, self._device, self._watched_wait = group, shared_rows, device, watched_wait
        self.arena = HostRows(pinned=True)
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._senders, self._sent, self._receivers, self._landed = (
            WorkerThreads(count, f"outcore {name}", finish=False)
            for name, count in (("send", 1), ("sent", 1), ("receive", 4), ("landed", 1))
        )

    def send(
        self,
        tensor: torch.Tensor,
        layout: TensorLayout,
        target: int,
        tag: int,
        done: Moved,
        *,
        given_away: bool = False,
    ) -> OutgoingTensor:
        """Post the send of a tensor."""
        flat = layout.flat(tensor).view(torch.uint8)
        row = self.shared_rows.take(layout.nbytes) if self.shared_rows.reaches(target) else None
        host = self.arena.take(layout.nbytes) if row is None else row.tensor
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            began = _mark()
            host.copy_(flat, non_blocking=True)
            ended = _mark()
            flat.record_stream(self._out)
        done("copy out", began, ended)

        def post() -> tuple[Any, float]:
            ended.synchronize()
            since = time.perf_counter()
            if row is None:
                return dist.isend(host, dst=target, group=self._group, tag=tag), since
            self.shared_rows.send_row(row, target, tag)
            return None, since

        posted = self._senders.submit(post)

        def finish() -> None:
            work, since = posted.result()
            if work is None:
                self.shared_rows.finish()
            else:
                work.wait()
            done("send", since, time.perf_counter())

        return SentTensor(self._sent.submit(finish), self._watched_wait)

    def copies(self, target: int, nbytes: int) -> bool:
        """Never: the copy out runs beside kernels."""
        return False

    def receive(self, layout: TensorLayout, source: int, tag: int, done: Moved) -> IncomingTensor:
        """Post the receive of a tensor."""
        come = self._expect(layout, source, tag)
        posted = time.perf_counter()

        def land() -> tuple[torch.Tensor, Moment]:
            host = come()
            done("receive", posted, time.perf_counter())
            with torch.cuda.device(self._device), torch.cuda.stream(self._in):
                began = _mark()
                flat = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
                flat.copy_(host, non_blocking=True)
                ended = _mark()
            done("copy in", began, ended)
            self._landed.submit(self._keep, host, ended)
            return flat, ended

        return _Landing(self._receivers.submit(land), layout, self._watched_wait)

    def _expect(self, layout: TensorLayout, source: int, tag: int) -> Callable[[], torch.Tensor]:
        """A function that waits for the bytes on the host."""
        if self.shared_rows.reaches(source):
            return lambda: self.shared_rows.receive(source, tag, layout.nbytes)
        flat = self.arena.take(layout.nbytes)
        work: Any = dist.irecv(flat, src=source, group=self._group, tag=tag)

        def come() -> torch.Tensor:
            work.wait()
            return flat

        return come

    def _keep(self, host: torch.Tensor, until: Moment) -> None:
        """Hold a row until it has been copied; kernels that wait for the copy are launched before."""
        until.synchronize()
        del host

    def end_step(self) -> None:
        """Clean up when all transfers of a step are over."""
        self.arena.end_step()
        self.shared_rows.end_step()

    def close(self) -> None:
        """Close the transport."""
        self._group = None
        for tasks in (self._senders, self._sent, self._receivers, self._landed):
            tasks.close(0.0)  # without waiting for transfers that may never end
        self.shared_rows.close()


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
