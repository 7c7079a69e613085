"""Copies of dense memory between a device and the tier below it, beside the computing.

A copy is *booked*: it starts when the marks it comes after are reached and gives a mark itself. On a GPU a mark is an
event and the host goes on at once; on a CPU it is a task of a copying thread. There are two copy streams each way,
because one large tensor that left first must not hold up a small one that is needed sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from outcore.worker_threads import WorkerTask, WorkerThreads

__all__ = [
    "Copy",
    "CopyEvent",
    "CopyStreams",
    "CudaCopyStreams",
    "Ends",
    "RoundTripCopy",
    "ThreadCopyStreams",
    "copy_streams_for",
]


class CopyEvent(Protocol):
    """The end of something."""

    def wait(self) -> None:
        """What is computed from here on comes after it."""

    def finish(self) -> None:
        """The host waits for it."""

    def done(self) -> bool:
        """Whether it is over."""


Copy = tuple[torch.Tensor, torch.Tensor, Sequence[CopyEvent]]
"""Where to, where from, and what comes before."""
Ends = tuple[torch.Tensor, torch.Tensor]
"""The same piece on the device and at home."""


class RoundTripCopy(Protocol):
    """Copies out and back, in parts."""

    def book(self) -> list[CopyEvent]:
        """Book them after what was computed so far; gives the mark of each part, when the last of it is back."""


class CopyStreams(Protocol):
    """Books copies."""

    def now(self) -> CopyEvent:
        """The end of what was computed so far."""

    def copy(self, copies: Sequence[Copy], *, out: bool, express: bool = False) -> list[CopyEvent]:
        """Book copies, out of the device or back to it; gives the mark of each."""

    def turn(self, parts: Sequence[Sequence[Ends]]) -> RoundTripCopy:
        """Copies out of the device and, each when it has left, straight back, to be booked again and again; one part
        after the other."""

    def close(self) -> None:
        """Finish everything that was booked."""


def copy_streams_for(device: torch.device) -> CopyStreams:
    """The copy streams between a device and the tier below it."""
    return CudaCopyStreams(device) if device.type == "cuda" else ThreadCopyStreams()


# Below a GPU


class _Event:
    """A mark on a stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event, self.device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def finish(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return bool(self.event.query())


class CudaCopyStreams:
    """Streams: an ordinary and an express one each way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = {(out, express): torch.cuda.Stream(device) for out in (False, True) for express in (False, True)}
        self.turns: list[CudaRoundTripCopy] = []

    def now(self) -> CopyEvent:
        """The end of what was given to the computing stream."""
        return _Event(torch.cuda.current_stream(self.device).record_event(), self.device)

    def copy(self, copies: Sequence[Copy], *, out: bool, express: bool = False) -> list[CopyEvent]:
        """Book copies on a stream."""
        stream = self.streams[out, express]
        marks: list[CopyEvent] = []
        with torch.cuda.stream(stream):
            for to, source, after in copies:
                for mark in after:
                    assert isinstance(mark, _Event)
                    stream.wait_event(mark.event)
                to.copy_(source, non_blocking=True)
                marks.append(_Event(stream.record_event(), self.device))
        return marks

    def turn(self, parts: Sequence[Sequence[Ends]]) -> RoundTripCopy:
        """On streams of its own."""
        self.turns.append(turn := CudaRoundTripCopy(parts, self.device))
        return turn

    def close(self) -> None:
        """Wait for all streams."""
        for stream in (*self.streams.values(), *(stream for turn in self.turns for stream in turn.streams)):
            stream.synchronize()


class CudaRoundTripCopy:
    """Copies out and back as one CUDA graph: the host is what small networks wait for, and copies by the dozen would
    take it as long as as many kernels. Every part but the last ends with an event inside the graph, for others to wait
    for while it goes on. The first time copies are booked one by one, and always where they could not be recorded."""

    def __init__(self, parts: Sequence[Sequence[Ends]], device: torch.device) -> None:
        self.parts, self.device = parts, device
        self.streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.booked = 0
        self.ready = torch.cuda.Event()
        self.back = [torch.cuda.Event(external=True) for _ in parts]
        self.marks: list[CopyEvent] = [_Event(event, device) for event in self.back]

    def book(self) -> list[CopyEvent]:
        """After what was computed so far; whoever waits for a mark waits for the last time it was booked."""
        out, _ = self.streams
        if self.booked == 1:
            self._record()
        self.booked += 1
        self.ready.record(torch.cuda.current_stream(self.device))
        out.wait_event(self.ready)
        with torch.cuda.stream(out):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._copy()
        self.back[-1].record(out)
        return list(self.marks)

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
        except RuntimeError:  # somebody else records; copies one by one are as right
            return
        self.graph = graph

    def _copy(self) -> None:
        out, back = self.streams
        for i, part in enumerate(self.parts):
            for here, home in part:
                home.copy_(here, non_blocking=True)
                back.wait_event(out.record_event())
                with torch.cuda.stream(back):
                    here.copy_(home, non_blocking=True)
            if i + 1 < len(self.parts):
                with torch.cuda.stream(back):
                    self.back[i].record(back)
        out.wait_stream(back)


# Below a CPU


class _Task:
    """A mark of a copying thread."""

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
        """A CPU has computed what it was told to compute."""
        return _Task(None)

    def copy(self, copies: Sequence[Copy], *, out: bool, express: bool = False) -> list[CopyEvent]:
        """Book copies on a thread; what comes before them was booked before them, so nobody waits for ever."""
        if out not in self.threads:
            self.threads[out] = WorkerThreads(1, "outcore-state")

        def run(to: torch.Tensor, source: torch.Tensor, after: Sequence[CopyEvent]) -> None:
            for mark in after:
                mark.finish()
            to.copy_(source)

        return [_Task(self.threads[out].submit(run, *each)) for each in copies]

    def turn(self, parts: Sequence[Sequence[Ends]]) -> RoundTripCopy:
        """On both threads."""
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

    def book(self) -> list[CopyEvent]:
        """Now: a CPU has computed what it was told to compute."""
        marks = []
        for part in self.parts:
            left = self.copy_streams.copy([(home, here, ()) for here, home in part], out=True)
            back = [(here, home, [mark]) for (here, home), mark in zip(part, left, strict=True)]
            marks.append(self.copy_streams.copy(back, out=False)[-1])
        return marks
