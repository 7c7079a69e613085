"""A process for one network in one precision: it prepares its cases while others do, and times one when it is asked to.

Preparing (capture, bytes, a first step that loads and plans the kernels) takes the host, not the device's time, so all
workers do it at once. Timing needs the machine alone, so the parent asks one worker at a time.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import networks
import torch
from case import Case, clean

from outcore.cost.measured import host_time

SPAWN = multiprocessing.get_context("spawn")


class Room:
    """The device's memory, shared out in GiB among those who prepare at the same time."""

    def __init__(self, gib: int) -> None:
        self.gib = gib
        self.turn, self.free = SPAWN.Lock(), SPAWN.Semaphore(gib)

    @contextlib.contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Wait until so much is free."""
        share = min(self.gib, math.ceil(nbytes / 2**30))
        with self.turn:  # one at a time, else two may each hold half of what they need
            for _ in range(share):
                self.free.acquire()
        try:
            yield
        finally:
            for _ in range(share):
                self.free.release()


class Worker:
    """The parent's side: `ask` sends, `answer` waits."""

    def __init__(self, name: str, precision: str, kind: str, room: Room) -> None:
        self.name, self.precision = name, precision
        self.room = room  # must live until the process has opened it
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(theirs, name, precision, kind, room), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, what: str, size: int, seconds: float = 0.0, between: float | None = None) -> None:
        """ "prepare" a batch size, or "run" it; `between` is what lies between calls, if it is known."""
        with contextlib.suppress(OSError):
            self.pipe.send((what, size, seconds, between))

    def answer(self, timeout: float) -> dict[str, Any]:
        """The row of a case, or an empty one for a preparation; a worker that died or is late leaves an error."""
        try:
            if self.pipe.poll(max(0.0, timeout)):
                row: dict[str, Any] = self.pipe.recv()
                return row
            return {"error": "TimeoutError: no answer in time"}
        except (EOFError, OSError):
            return {"error": "EOFError: the process died"}

    def close(self) -> None:
        self.ask("end", 0)
        self.process.join(2)
        self.process.kill()


def serve(pipe: Any, name: str, precision: str, kind: str, room: Room) -> None:
    """The worker's side."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.device(kind)
    network = (networks.GPU if kind == "cuda" else networks.CPU)[name]
    prepared: dict[int, Case] = {}

    def case_of(size: int) -> Case:
        case = Case(network, size, precision == "bf16", device)
        with room.taken(case.room_bytes):
            case.warm_up()
            clean(device)
        gc.freeze()  # looking through a captured network for garbage takes a tenth of a second
        return case

    for what, size, seconds, between in _asked(pipe):
        if what == "prepare":
            with contextlib.suppress(Exception):  # the memory may be full of others: again when its turn comes
                prepared[size] = case_of(size)
            pipe.send({})
            continue
        row: dict[str, Any] = {"network": name, "batch": size, "precision": precision}
        if between is not None:
            host_time.remember(device, between)
        try:
            case = prepared.pop(size, None) or case_of(size)
            figures, row["distinct"] = case.run(seconds)
            row |= figures
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
            traceback.print_exc(limit=-2)
        case = None
        clean(device)
        pipe.send(row)


def _asked(pipe: Any) -> Iterator[tuple[str, int, float, float | None]]:
    with contextlib.suppress(EOFError):
        while (message := pipe.recv())[0] != "end":
            yield message
