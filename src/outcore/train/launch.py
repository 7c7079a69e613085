"""Several ranks from one command, on this computer: the same program started once for each, as torchrun would.

Each process gets the variables that torchrun sets and finds its rank in them. Signals are passed on to all of them;
each finishes its step, saves and leaves. A terminal sends Ctrl-C to a whole process group, so the ranks have groups of
their own: heard twice it would mean to stop at once, without saving. If one ends with an error the others are asked to
end too, and after a while made to; the first error is the one that is reported.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["COMMAND", "launch", "rank_environment"]

COMMAND = "OUTCORE_COMMAND"
"""The variable in which ranks find the command that was typed."""

_GRACE_S = 20.0
_LOOK_S = 0.05
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun tells a process."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        COMMAND: os.environ.get(COMMAND) or shlex.join(["outcore", *sys.argv[1:]]),
    }


def launch(config: Path, ranks: int) -> int:
    """Train with so many processes; returns the exit code of the first that failed, or 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "outcore", "train", str(config)]
    environments = (rank_environment(rank, ranks, port) for rank in range(ranks))
    processes = [subprocess.Popen(command, env=environment, process_group=0) for environment in environments]

    def pass_on(number: int, frame: Any) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        return _wait(processes)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _end(processes)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all are done, or one has failed."""
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            _end(processes)
            return failed if failed > 0 else 128 - failed
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_LOOK_S)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Give the others time to notice, then end them; only processes started here."""
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(_LOOK_S)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
