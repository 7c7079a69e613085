"""Keeps a worker at work on a job, within limits, and remembers the last pieces that it made.

A worker that has not made its first piece in time, or takes more memory than it may, is ended; so is one whose job has
changed. Another takes its place, started ahead with everything imported. Whatever happens to a worker, the pieces of
the last network that worked stay, and a message says what went wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outcore.errors import OutcoreError
from outcore.explore.child_process import answer_of, end, resident_bytes, spawn
from outcore.explore.parts import ExploreSettings
from outcore.machine.units import format_bytes

__all__ = ["Supervisor", "WorkerLimits"]

_EVERY_S = 0.25
_WORKER = "outcore.explore.worker"


@dataclass(frozen=True)
class WorkerLimits:
    """What a worker may take."""

    first_s: float = 180.0
    """Until the network and its costs are there."""
    answer_s: float = 20.0
    """To simulate a plan."""
    memory_bytes: int | None = None
    """Of the process; three quarters of the machine's memory if not given."""

    @property
    def most_bytes(self) -> int:
        """The bytes that hold."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4


class Supervisor:
    """One job, looked at again whenever it is asked to be."""

    def __init__(self, settings: ExploreSettings, limits: WorkerLimits = WorkerLimits(), *, spare: bool = True) -> None:  # noqa: B008
        self.settings, self.limits = settings, limits
        self.pieces: dict[str, Any] = {}
        self.status: dict[str, str] = {"kind": "busy", "text": "starting"}
        self.trouble: dict[str, Any] | None = None
        job = Path(settings.job)
        self.files: set[str] = {str(job.resolve())} if job.suffix == ".py" else set()
        self.printed: deque[str] = deque(maxlen=200)
        self._listeners: set[asyncio.Queue[str]] = set()
        self._keeps_spare = spare
        self._spare: asyncio.subprocess.Process | None = None
        self._worker: asyncio.subprocess.Process | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._asked = 0
        self._ready = asyncio.Event()
        self._measuring = False
        self.run: dict[str, Any] | None = None
        """A training run that is watched."""
        self.size: tuple[int | None, int | None] = (settings.batch, settings.image)
        """Batch and image that are looked at; none for the job's own."""

    async def resize(self, batch: int | None, image: int | None) -> None:
        """Look at the job with another batch and image size; none for what it was started with."""
        self.size = (batch or self.settings.batch, image or self.settings.image)
        await self.start()

    async def start(self) -> None:
        """Look at the job, from the beginning."""
        await self._end_worker()
        self._say(status={"kind": "busy", "text": "recording the network…"})
        spare, self._spare = self._spare, None
        worker = spare if spare is not None and spare.returncode is None else await spawn(_WORKER)
        self._worker = worker
        self._ready.clear()
        self._write(worker, {"explore": asdict(replace(self.settings, batch=self.size[0], image=self.size[1]))})
        self._begin(self._read(worker))
        self._begin(self._drain(worker))
        self._begin(self._guard(worker))

    async def close(self) -> None:
        """End all workers."""
        await self._end_worker()
        await end(self._spare)
        for task in self._tasks:
            task.cancel()

    async def simulate(self, policy: dict[str, str], change: dict[str, str]) -> dict[str, Any]:
        """What a step takes with the policies of some blocks changed.

        Raises:
            OutcoreError: it cannot be done, or the worker does not answer.
        """
        worker = self._worker
        if worker is None or worker.returncode is not None:
            raise OutcoreError("the network is being recorded; try again in a moment")
        self._asked += 1
        number = self._asked
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._write(worker, {"simulate": {"policy": policy, "change": change}, "id": number})
        try:
            answer = await asyncio.wait_for(self._answers[number], self.limits.answer_s)
        except TimeoutError:
            raise OutcoreError(
                f"no answer within {self.limits.answer_s:g} s; plans may still be searched for"
            ) from None
        finally:
            del self._answers[number]
        if "error" in answer:
            raise OutcoreError(answer["error"])
        value: dict[str, Any] = answer["value"]
        return value

    async def measure(self, plan: dict[str, Any] | None, needed_bytes: int) -> dict[str, Any]:
        """Run a step on this machine, in a process of its own, and record it.

        Args:
            plan: the document of the plan to run it by; none for plain training.
            needed_bytes: what the step is predicted to hold; refused if that is not free here.

        Raises:
            OutcoreError: it cannot be run, is ended by a limit, or another one is running.
        """
        if self._measuring:
            raise OutcoreError("a step is running already; wait for it")
        self._measuring = True
        limits = self.limits
        settings = asdict(replace(self.settings, batch=self.size[0], image=self.size[1]))
        request = {"settings": settings, "plan": plan, "needed_bytes": needed_bytes}
        try:
            found, wrong = await answer_of(
                "outcore.explore.measured_step", request, seconds=limits.first_s, most_bytes=limits.most_bytes
            )
        finally:
            self._measuring = False
        if wrong == "time":
            raise OutcoreError(f"the step was not done within {limits.first_s:g} s")
        if wrong.startswith("memory"):
            held, most = format_bytes(int(wrong.split()[-1])), format_bytes(limits.most_bytes)
            raise OutcoreError(f"the step took {held} of this machine's memory; it may take {most}")
        if wrong:
            raise OutcoreError(f"the step's process ended with {wrong}")
        if "error" in found:
            raise OutcoreError(found["error"])
        measured: dict[str, Any] = found
        return measured

    def show_run(self, piece: dict[str, Any]) -> None:
        """Have a training run's figures on the page, whatever becomes of the job."""
        self.run = piece
        self._say(pieces={"run": piece})

    async def messages(self) -> AsyncIterator[str]:
        """What a page is sent: first all that is known, then what changes."""
        queue: asyncio.Queue[str] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            yield json.dumps(
                {
                    "pieces": self.pieces | ({"run": self.run} if self.run else {}),
                    "status": self.status,
                    "trouble": self.trouble,
                }
            )
            while True:
                yield await queue.get()
        finally:
            self._listeners.discard(queue)

    def _say(self, **message: Any) -> None:
        self.status = message.get("status", self.status)
        self.trouble = message.get("trouble", self.trouble)
        text = json.dumps(message)
        for queue in self._listeners:
            queue.put_nowait(text)

    async def _read(self, worker: asyncio.subprocess.Process) -> None:
        """Take what a worker says until it ends."""
        assert worker.stdout is not None
        while line := await worker.stdout.readline():
            if worker is not self._worker:
                return
            self._take(json.loads(line))
        code = await worker.wait()
        if worker is self._worker:
            said = "".join(self.printed)[-3000:]
            self._fail({"kind": "the job's process ended", "message": f"exit code {code}", "place": "", "trace": said})

    def _take(self, message: dict[str, Any]) -> None:
        if "files" in message:
            self.files |= set(message["files"])
        elif "pieces" in message:
            pieces = message["pieces"]
            if "about" in pieces:
                self.pieces = {}
                pieces["about"]["resized"] = self.size != (self.settings.batch, self.settings.image)
                self._ready.set()
                self._say(pieces=pieces, trouble=None, status={"kind": "busy", "text": "predicting other sizes…"})
                if self._keeps_spare and self._spare is None:
                    self._begin(self._start_spare())
            else:
                searching = {"kind": "busy", "text": "searching for plans…"} if "plans" in pieces else self.status
                self._say(pieces=pieces, status=searching)
            self.pieces |= pieces
        elif "trouble" in message:
            self._fail(message["trouble"])
        elif "done" in message:
            self._say(status={"kind": "", "text": "up to date"})
        elif (future := self._answers.get(message.get("answer", 0))) is not None and not future.done():
            future.set_result(message)

    def _fail(self, trouble: dict[str, Any]) -> None:
        self._ready.set()
        self._say(trouble=trouble, status={"kind": "broken", "text": "the job has an error"})

    async def _drain(self, worker: asyncio.subprocess.Process) -> None:
        """Keep the end of what the job prints, and let it print."""
        assert worker.stderr is not None
        while chunk := await worker.stderr.read(65536):
            self.printed.append(chunk.decode(errors="replace"))

    async def _guard(self, worker: asyncio.subprocess.Process) -> None:
        """End a worker that takes too long or too much."""
        waited = 0.0
        while worker.returncode is None and worker is self._worker:
            await asyncio.sleep(_EVERY_S)
            waited += _EVERY_S
            held = resident_bytes(worker.pid)
            if held > self.limits.most_bytes:
                said = (
                    f"the job's process took {format_bytes(held)}; it may take {format_bytes(self.limits.most_bytes)}"
                )
            elif not self._ready.is_set() and waited > self.limits.first_s:
                said = f"the job was not recorded within {self.limits.first_s:g} s"
            else:
                continue
            self._worker = None
            await end(worker)
            trace = "".join(self.printed)[-3000:]
            self._fail({"kind": "the job's process was ended", "message": said, "place": "", "trace": trace})

    async def _start_spare(self) -> None:
        self._spare = await spawn(_WORKER)

    async def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        await end(worker)

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _write(worker: asyncio.subprocess.Process, message: dict[str, Any]) -> None:
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(message).encode() + b"\n")
