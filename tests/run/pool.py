"""Real processes for tests, started once and used again: each call is a world of its own with its own process group.

They are forked from one process that has imported torch and outcore and done nothing else: importing takes longer than
most worlds do. What was imported is out of the garbage collector's sight, which looks for leftovers after every world.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 240.0
ENDED = "ended without an answer"
IMPORTED = ["tests.run.training", "tests.run.varying", "tests.run.resuming"]
GRACE_S = 60.0
"""How long the others may take when one has failed: the engine's own bounds are far below, a busy machine is not."""


class RankError(Exception):
    """What a rank raised, as text."""


def _serve(connection: Any, port: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()
    while True:
        task = connection.recv()
        if task is None:
            return
        function, rank, size, prefix, args, kwargs = task
        store: Any = None
        try:
            if size > 1:
                store = dist.TCPStore("127.0.0.1", port, is_master=False)
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(prefix, store),
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=120),
                )
        except BaseException as error:
            # torch counts process groups, and a count that is not that of the other ranks never meets them again.
            connection.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
            return
        # The group of the pool is not the engine's; imports of a test may keep it. A world that was made to fail may
        # leave a thread that waits for the transport to give up, which is not the next world's.
        before, earlier = _open_files(), set(threading.enumerate())
        answer: tuple[bool, Any]
        try:
            answer = (True, function(*args, **kwargs))
        except BaseException as error:
            answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        store = None
        if answer[0] and (left := _left_behind(before, earlier)):
            answer = (False, f"the rank left behind: {', '.join(left)}")
        gc.collect()
        if not answer[0] and any(t.name.startswith("outcore") for t in set(threading.enumerate()) - earlier):
            # An engine that failed and was not closed still watches the others, and ends its process when they do not
            # answer: that must not happen in the middle of the next world.
            connection.send((None, answer[1]))
            return
        del earlier
        connection.send(answer)


def _left_behind(before: set[str], earlier: set[threading.Thread]) -> list[str]:
    """Threads of the engine's, shared memory and sockets that a world should have taken with it."""
    watched_wait = time.monotonic() + 10.0
    while True:
        gc.collect()
        found = [t.name for t in set(threading.enumerate()) - earlier if t.name.startswith("outcore")]
        found += sorted(_open_files() - before)
        if not found or time.monotonic() > watched_wait:
            return found
        time.sleep(0.05)


def _open_files() -> set[str]:
    """Sockets, pipes and shared memory of this process; CUDA has pipes of its own."""
    kinds = ("socket:", "/memfd:", "/dev/shm", *(() if torch.cuda.is_initialized() else ("pipe:",)))
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if (what := str(path.readlink())).startswith(kinds):
                found.add(what)
    return found


class Pool:
    """Worker processes that run a function as the ranks of one world."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED)
        self._workers: dict[int, tuple[Any, Any]] = {}
        self._store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._count = 0

    def run(self, function: Callable[..., Any], ranks: int, *args: Any, **kwargs: Any) -> list[Any]:
        """What the function returns on every rank; raises what a rank raised."""
        answers = self.outcomes(function, ranks, *args, **kwargs)
        if failed := [f"rank {rank}: {answer}" for rank, (good, answer) in enumerate(answers) if not good]:
            raise RankError("\n".join(failed))
        return [answer for _, answer in answers]

    def outcomes(self, function: Callable[..., Any], ranks: int, *args: Any, **kwargs: Any) -> list[tuple[bool, Any]]:
        """Per rank, whether it went well, and what it returned or raised."""
        self._end({rank for rank, (process, _) in self._workers.items() if not process.is_alive()})
        for rank in set(range(ranks)) - self._workers.keys():
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there, self._store.port), daemon=True)
            process.start()
            there.close()
            self._workers[rank] = (process, here)
        self._count += 1
        for rank in range(ranks):
            task = (function, rank, ranks, f"world{self._count}", args, kwargs)
            self._workers[rank][1].send(task)
        deadline = time.monotonic() + TIMEOUT_S
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {self._workers[rank][1]: rank for rank in range(ranks)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    answers[rank] = (False, ENDED)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            if not ready:
                break
        lost = {r for r in range(ranks) if r not in answers or answers[r] == (False, ENDED) or answers[r][0] is None}
        self._end(lost)
        rows = [answers.get(rank, (False, f"no answer within {TIMEOUT_S} s")) for rank in range(ranks)]
        return [(bool(good), answer) for good, answer in rows]

    def close(self) -> None:
        """End all workers."""
        for _, connection in self._workers.values():
            with suppress(OSError):
                connection.send(None)
        self._end(set(self._workers), watched_wait_s=0.5)
        self._store = None

    @property
    def port(self) -> int:
        """Where ranks meet."""
        return int(self._store.port)

    def _end(self, ranks: set[int], watched_wait_s: float = 0.0) -> None:
        for rank in ranks:
            process, connection = self._workers.pop(rank)
            process.join(watched_wait_s)
            if process.is_alive():
                process.kill()
                process.join(5)
            connection.close()


@contextmanager
def pool() -> Iterator[Pool]:
    made = Pool()
    try:
        yield made
    finally:
        made.close()
