"""Processes that prepare side by side on the processor, and use the device one at a time.

Every row is a process. It asks for the device before its first step and gives it back, with all memory that it does
not use, while it only computes on the processor, so that the device is never shared and seldom idle. While steps are
timed, all other processes stand still (SIGSTOP), so that the interpreter is not slowed down either. Who ends without a
word, or takes too long, has given everything back.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.gate import children

__all__ = ["Asked", "Turn", "Worker", "run_all"]


class Turn:
    """The device, for this process alone; asks whoever hands it out."""

    def __init__(self, ask: Callable[[str], None], synchronize: Callable[[], None] = lambda: None) -> None:
        self.ask, self.synchronize = ask, synchronize
        self.held, self.since, self.waited_s, self.held_s = False, 0.0, 0.0, 0.0

    @classmethod
    def by(cls, pipe: Any, synchronize: Callable[[], None] = lambda: None) -> Turn:
        """One that asks by the pipe of a `Worker`."""

        def ask(what: str) -> None:
            pipe.send(what)
            pipe.recv()

        return cls(ask, synchronize)

    def take(self) -> None:
        if not self.held:
            begin = time.perf_counter()
            self.ask("alone")
            self.held, self.since = True, time.perf_counter()
            self.waited_s += self.since - begin

    def give(self) -> None:
        if self.held:
            self.synchronize()
            self.ask("free")
            self.held, self.held_s = False, self.held_s + time.perf_counter() - self.since

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """All other processes stand still meanwhile."""
        self.take()
        self.synchronize()
        self.ask("quiet")
        try:
            yield
        finally:
            self.ask("loud")

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Others may have it meanwhile."""
        held = self.held
        self.give()
        try:
            yield
        finally:
            if held:
                self.take()


@dataclass
class Asked:
    """A row that can begin."""

    target: Callable[..., None]
    args: tuple[Any, ...]
    done: Callable[[dict[str, Any]], None]
    name: str


class Worker:
    """A process that measures one row."""

    def __init__(self, asked: Asked, context: Any) -> None:
        self.asked = asked
        self.here, there = context.Pipe()
        self.process = context.Process(target=asked.target, args=(*asked.args, there), daemon=False)
        self.process.start()
        there.close()
        self.began, self.idle_s, self.stopped_at = time.monotonic(), 0.0, 0.0
        self.asked_at: float | None = None

    @property
    def pids(self) -> list[int]:
        return [self.process.pid, *children(self.process.pid)] if self.process.pid else []

    @property
    def busy_s(self) -> float:
        """How long it has worked: without standing still and without waiting for the device."""
        waiting = time.monotonic() - self.asked_at if self.asked_at is not None else 0.0
        return time.monotonic() - self.began - self.idle_s - waiting

    def signal(self, what: signal.Signals) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)
        if what == signal.SIGSTOP:
            self.stopped_at = time.monotonic()
        elif what == signal.SIGCONT and self.stopped_at:
            if self.asked_at is None:
                self.idle_s += time.monotonic() - self.stopped_at
            self.stopped_at = 0.0

    def end(self) -> None:
        """Kill the process and those that it has started."""
        self.signal(signal.SIGKILL)
        self.process.join(5)
        self.here.close()


class _Device:
    """Who has the device, and who waits for it."""

    def __init__(self, settle_s: float) -> None:
        self.holder: Worker | None = None
        self.queue: list[Worker] = []
        self.quiet, self.settle_s = False, settle_s

    def hear(self, worker: Worker, message: Any, all_: Iterable[Worker]) -> None:
        if message == "alone":
            worker.asked_at = time.monotonic()
            self.queue.append(worker)
        elif message == "quiet":
            for other in all_:
                other.signal(signal.SIGSTOP) if other is not worker else None
            self.quiet = True
            time.sleep(self.settle_s)
            worker.here.send("go")
        elif message == "loud":
            self.go_on(all_)
            worker.here.send("go")
        elif message == "free":
            self.release(worker, all_)
            worker.here.send("go")

    def release(self, worker: Worker, all_: Iterable[Worker]) -> None:
        if worker in self.queue:
            self.queue.remove(worker)
        if self.holder is worker:
            self.go_on(all_)
            self.holder = None

    def go_on(self, all_: Iterable[Worker]) -> None:
        if self.quiet:
            for other in all_:
                other.signal(signal.SIGCONT)
            self.quiet = False

    def grant(self) -> None:
        if self.holder is None and self.queue:
            self.holder = self.queue.pop(0)
            if self.holder.asked_at is not None:
                self.holder.idle_s += time.monotonic() - self.holder.asked_at
                self.holder.asked_at = None
            self.holder.here.send("go")


def run_all(
    next_: Callable[[], Asked | None],
    *,
    processes: int,
    limit_s: float,
    until: float,
    settle_s: float = 0.1,
    preload: Iterable[str] = (),
) -> None:
    """Run rows until there are none or the time is up.

    Args:
        next_: the next row that can begin; none if there is none now.
        processes: beside each other; whoever does not have the device holds hardly more than its weights there.
        limit_s: of work for each.
        until: by `time.monotonic`; what runs then is ended.
        settle_s: after others were told to stand still.
        preload: modules that every process needs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    workers: list[Worker] = []
    device = _Device(settle_s)

    def finish(worker: Worker, row: dict[str, Any]) -> None:
        workers.remove(worker)
        device.release(worker, [*workers, worker])
        worker.end()
        worker.asked.done(row)

    try:
        while time.monotonic() < until:
            while len(workers) < processes and not device.quiet:
                asked = next_()
                if asked is None:
                    break
                workers.append(Worker(asked, context))
            if not workers:
                return
            device.grant()
            for here in wait([w.here for w in workers], timeout=0.05):
                worker = next(w for w in workers if w.here is here)
                assert isinstance(here, Connection)
                try:
                    message = here.recv()
                except (EOFError, OSError):
                    finish(worker, {"error": f"the process ended with {worker.process.exitcode}"})
                    continue
                if isinstance(message, dict):
                    finish(worker, message)
                else:
                    device.hear(worker, message, workers)
            for worker in [w for w in workers if w.busy_s > limit_s and not w.stopped_at]:
                finish(worker, {"error": f"took more than {limit_s:.0f} s"})
    finally:
        device.go_on(workers)
        for worker in workers:
            worker.end()
