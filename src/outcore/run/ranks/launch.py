"""Start ranks from Python.

    results = outcore.run.ranks.launch(train, 4, "plan.json")

runs ``train("plan.json")`` in four processes on this machine and returns what each returned. The function must be
importable (not a lambda), as for any process that is started anew. Its arguments are copied: multiprocessing would hand
over tensors in shared memory, and ranks that each update all parameters of a model would update the same ones. Ranks
that fail are restarted together as often as `restarts` says; a function that resumes from the last checkpoint then goes
on from there.

The ranks rendezvous in a store that this process runs, on loopback, behind a secret made for each attempt; torch's
elastic rendezvous, which listens everywhere and unpickles what it is sent, is not used. What a rank returns comes back
through a pipe that only the two of them have. No signal handler is changed here. Ranks end with this process, however
it ends.

Every rank has its own copy of the arguments, as processes on several hosts would. Left to itself, torch would put the
tensors of a model that is passed here into memory that all ranks share, and replicas would step the same weights.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection
from typing import Any

from outcore.errors import EngineError
from outcore.machine.host_allocator import keep_freed_memory
from outcore.run.ranks.parent_death import LAUNCHER, end_with_parent
from outcore.run.ranks.rendezvous import ADDRESS, VARIABLE
from outcore.run.ranks.store import StoreServer, new_secret
from outcore.run.stopped import LOOK_S, StoppedRanks

_GRACE_S = 20.0
"""Seconds for the other ranks to notice that one failed; then they are ended."""


def rank_variables(rank: int, ranks: int, store: StoreServer, secret: str) -> dict[str, str]:
    """The environment variables of a rank on this machine: torchrun's, the address of the store, and the run's
    secret."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        **({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": store.address,
        "MASTER_PORT": str(store.port),
        ADDRESS: f"{store.address}:{store.port}",
        VARIABLE: secret,
        LAUNCHER: str(os.getpid()),
    }


def launch(function: Callable[..., Any], ranks: int, *args: Any, restarts: int = 0) -> list[Any]:
    """Run a function on so many ranks of this machine; returns what each of them returned.

    Raises:
        EngineError: a rank failed for good; names it, and what it said first.
    """
    for attempt in range(restarts + 1):
        failed, found = _attempt(function, ranks, args, attempt)
        if failed is None:
            return [found[rank] for rank in range(ranks)]
    raise EngineError(failed)


def _attempt(
    function: Callable[..., Any], ranks: int, args: tuple[Any, ...], number: int
) -> tuple[str | None, dict[int, Any]]:
    """One try: what the first rank that failed said, and what the others returned by rank."""
    context = multiprocessing.get_context("spawn")
    asked = pickle.dumps((function, args))
    secret = new_secret()
    server = StoreServer(secret).start()
    processes: list[Any] = []
    pipes: dict[connection.Connection, int] = {}
    try:
        for rank in range(ranks):
            here, there = context.Pipe(duplex=False)
            variables = rank_variables(rank, ranks, server, secret) | {"TORCHELASTIC_RESTART_COUNT": str(number)}
            process = context.Process(target=_rank, args=(there, asked), name=f"rank {rank}")
            with _environment(variables), contextlib.closing(there):
                process.start()
            processes.append(process)
            pipes[here] = rank
        return _collect(processes, pipes, server)
    finally:
        _end(processes)
        for pipe in pipes:
            pipe.close()
        server.close()


def _collect(
    processes: list[Any], pipes: Mapping[connection.Connection, int], server: StoreServer
) -> tuple[str | None, dict[int, Any]]:
    """Wait until every rank has answered, or one has failed and the others had time to notice."""
    waiting, found = dict(pipes), dict[int, Any]()
    failed: str | None = None
    deadline: float | None = None
    stopped = StoppedRanks([process.pid for process in processes], server)
    while waiting:
        left = LOOK_S if deadline is None else max(0.0, deadline - time.monotonic())
        ready = connection.wait(list(waiting), left)
        if not ready and deadline is not None:
            break
        if deadline is None and (failed := stopped.found()) is not None:
            server.fail(failed)
            deadline = time.monotonic() + _GRACE_S
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            try:
                good, answer = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                good, answer = False, _how_ended(processes[rank], joined=server.find(f"beat/{rank}") is not None)
            if good:
                found[rank] = answer
            elif failed is None:
                failed = f"rank {rank} failed: {answer}"
                server.fail(failed)
                deadline = time.monotonic() + _GRACE_S
    return failed, found


def _how_ended(process: Any, *, joined: bool) -> str:
    process.join(_GRACE_S)
    code = process.exitcode or 0
    when = "" if joined else " while starting"
    return f"{signal.Signals(-code).name}{when}" if code < 0 else f"it ended with code {code}{when}, without an answer"


def _end(processes: list[Any]) -> None:
    """End ranks that are still there; only those started here."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(2.0)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _rank(pipe: connection.Connection, asked: bytes) -> None:
    """In a rank: run the function, and send what it returns or raises."""
    end_with_parent(int(os.environ[LAUNCHER]))()
    keep_freed_memory()  # whatever it measures, an Engine would run so
    try:
        function, args = pickle.loads(asked)
        answer = (True, function(*args))
    except BaseException as error:
        answer = (False, f"{type(error).__name__}: {error}")
    pipe.send_bytes(pickle.dumps(answer))
    if not answer[0]:
        raise SystemExit(1)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables that a process started meanwhile inherits; afterwards all is as it was."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
