"""Copies of dense memory between a device and off-device storage, beside the computing.

A copy is enqueued: it starts when the events it comes after are reached and gives an event itself. On a GPU that is a
CUDA event and the host goes on at once; on a CPU it is a task of a copy thread. There are two copy streams each way,
because one large tensor that left first must not hold up a small one that is needed sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from outcore.memory.offload.worker_threads import WorkerTask, WorkerThreads


class CopyEvent(Protocol):
    """The end of a copy, or of what was computed before one."""

    def wait(self) -> None:
        """Let what the device computes from here on begin after the copy."""

    def finish(self) -> None:
        """Block the host until the copy is over."""

    def done(self) -> bool:
        """Whether the copy is over."""


Copy = tuple[torch.Tensor, torch.Tensor, Sequence[CopyEvent]]
"""Destination, source, and the events that come before."""
Ends = tuple[torch.Tensor, torch.Tensor]
"""The same piece on the device and off it."""


class RoundTripCopy(Protocol):
    """Copies off the device and back, in parts."""

    def start(self) -> list[CopyEvent]:
        """Start them after what was computed so far; returns an event for each part, when the last of it is back."""


class CopyStreams(Protocol):
    """Enqueues copies between a device and its host, beside the computing."""

    def now(self) -> CopyEvent:
        """The end of what was computed so far."""

    def copy(self, copies: Sequence[Copy], *, out: bool, small: bool = False) -> list[CopyEvent]:
        """Enqueue copies off the device (`out`) or to it, on the stream for small ones if asked; returns the event of
        each."""

    def round_trip(self, parts: Sequence[Sequence[Ends]]) -> RoundTripCopy:
        """Copies off the device and, each when it is out, straight back, one part after the other; they can be started
        again and again."""

    def close(self) -> None:
        """Finish everything that was enqueued."""


def copy_streams_for(device: torch.device) -> CopyStreams:
    """The copy streams between a device and off-device storage."""
    return CudaCopyStreams(device) if device.type == "cuda" else ThreadCopyStreams()


# Below a GPU


class _Event:
    """A CUDA event on a stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event, self.device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def finish(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return bool(self.event.query())


class CudaCopyStreams:
    """CUDA streams: one for large and one for small copies each way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = {(out, small): torch.cuda.Stream(device) for out in (False, True) for small in (False, True)}
        self.round_trips: list[CudaRoundTripCopy] = []

    def now(self) -> CopyEvent:
        """The end of what was given to the compute stream."""
        return _Event(torch.cuda.current_stream(self.device).record_event(), self.device)

    def copy(self, copies: Sequence[Copy], *, out: bool, small: bool = False) -> list[CopyEvent]:
        """Enqueue copies on a stream."""
        stream = self.streams[out, small]
        events: list[CopyEvent] = []
        with torch.cuda.stream(stream):
            for to, source, after in copies:
                for event in after:
                    assert isinstance(event, _Event)
                    stream.wait_event(event.event)
                to.copy_(source, non_blocking=True)
                events.append(_Event(stream.record_event(), self.device))
        return events

    def round_trip(self, parts: Sequence[Sequence[Ends]]) -> RoundTripCopy:
        """A round trip on two streams of its own."""
        self.round_trips.append(round_trip := CudaRoundTripCopy(parts, self.device))
        return round_trip

    def close(self) -> None:
        """Wait for all streams."""
        for stream in (
            *self.streams.values(),
            *(stream for round_trip in self.round_trips for stream in round_trip.streams),
        ):
            stream.synchronize()


class CudaRoundTripCopy:
    """Copies out and back as one CUDA graph: small networks wait for the host, and dozens of copies would take it as
    long as dozens of kernels. Every part but the last ends with an event inside the graph, which others may wait for
    while it goes on. The first time copies are enqueued one by one, and always where they could not be recorded."""

    def __init__(self, parts: Sequence[Sequence[Ends]], device: torch.device) -> None:
        self.parts, self.device = parts, device
        self.streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.starts = 0
        self.ready = torch.cuda.Event()
        self.back = [torch.cuda.Event(external=True) for _ in parts]
        self.events: list[CopyEvent] = [_Event(event, device) for event in self.back]

    def start(self) -> list[CopyEvent]:
        """Start after what was computed so far; an event stands for the last time the copies were started."""
        out, _ = self.streams
        if self.starts == 1:
            self._record()
        self.starts += 1
        self.ready.record(torch.cuda.current_stream(self.device))
        out.wait_event(self.ready)
        with torch.cuda.stream(out):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._copy()
        self.back[-1].record(out)
        return list(self.events)

    def _record(self) -> None:
        for stream in self.streams:
            stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self.streams[0]):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._copy()
                finally:
                    graph.capture_end()
        except RuntimeError:  # another capture is under way; copies one by one are as right
            return
        self.graph = graph

    def _copy(self) -> None:
        out, back = self.streams
        for i, part in enumerate(self.parts):
            for on_device, off_device in part:
                off_device.copy_(on_device, non_blocking=True)
                back.wait_event(out.record_event())
                with torch.cuda.stream(back):
                    on_device.copy_(off_device, non_blocking=True)
            if i + 1 < len(self.parts):
                with torch.cuda.stream(back):
                    self.back[i].record(back)
        out.wait_stream(back)


# Below a CPU


class _Task:
    """A task of a copy thread."""

    def __init__(self, task: WorkerTask[None] | None) -> None:
        self.task = task

    def wait(self) -> None:
        self.finish()

    def finish(self) -> None:
        if self.task is not None:
            self.task.result()

    def done(self) -> bool:
        return self.task is None or self.task.over


class ThreadCopyStreams:
    """Threads: one each way, started when there is something to copy."""

    def __init__(self) -> None:
        self.threads: dict[bool, WorkerThreads] = {}

    def now(self) -> CopyEvent:
        """An event that is over: a CPU has computed all it was given."""
        return _Task(None)

    def copy(self, copies: Sequence[Copy], *, out: bool, small: bool = False) -> list[CopyEvent]:
        """Enqueue copies on a thread; the events they wait for were enqueued before them, so there is no deadlock."""
        if out not in self.threads:
            self.threads[out] = WorkerThreads(1, "outcore-state")

        def run(to: torch.Tensor, source: torch.Tensor, after: Sequence[CopyEvent]) -> None:
            for event in after:
                event.finish()
            to.copy_(source)

        return [_Task(self.threads[out].submit(run, *each)) for each in copies]

    def round_trip(self, parts: Sequence[Sequence[Ends]]) -> RoundTripCopy:
        """A round trip on both threads."""
        return ThreadRoundTripCopy(parts, self)

    def close(self) -> None:
        """Let the threads finish and end."""
        for thread in self.threads.values():
            thread.close()
        self.threads = {}

    def __del__(self) -> None:
        if getattr(self, "threads", None):
            self.close()


class ThreadRoundTripCopy:
    """Copies out on one thread and back on the other."""

    def __init__(self, parts: Sequence[Sequence[Ends]], copy_streams: ThreadCopyStreams) -> None:
        self.parts, self.copy_streams = parts, copy_streams

    def start(self) -> list[CopyEvent]:
        """Start at once: a CPU has computed all it was given."""
        events = []
        for part in self.parts:
            left = self.copy_streams.copy([(off_device, on_device, ()) for on_device, off_device in part], out=True)
            back = [(on_device, off_device, [event]) for (on_device, off_device), event in zip(part, left, strict=True)]
            events.append(self.copy_streams.copy(back, out=False)[-1])
        return events
