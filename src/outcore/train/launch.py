"""Several ranks from one command, on this computer: the same program started once for each, as torchrun would.

Each process gets the variables that torchrun sets and finds its rank in them. The ranks rendezvous in a store that this
process runs, on loopback, behind a secret of this run (`outcore.run.ranks.store`): a rank that is killed or stopped,
the first one too, does not take it along, and the others can say which it was. Signals are passed on to all of them;
each finishes its step, saves and leaves. A terminal sends Ctrl-C to a whole process group, so the ranks have groups of
their own: heard twice it would mean to stop at once, without saving. If one ends with an error the others are asked to
end too, and after a while made to; the first error is the one that is reported. Should this process be killed, the
ranks save and leave (`outcore.run.ranks.parent_death`).
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcore.run.ranks.launch import rank_variables
from outcore.run.ranks.store import StoreServer, new_secret
from outcore.run.stopped import StoppedRanks

__all__ = ["COMMAND", "command_variable", "launch"]

COMMAND = "OUTCORE_COMMAND"
"""The variable in which ranks find the command that was typed."""

_GRACE_S = 20.0
_LOOK_S = 0.05
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def command_variable() -> dict[str, str]:
    """The command that was typed, for the ranks."""
    return {COMMAND: os.environ.get(COMMAND) or shlex.join(["outcore", *sys.argv[1:]])}


def launch(config: Path, ranks: int) -> int:
    """Train with so many processes; returns the exit code of the first that failed, or 0."""
    secret = new_secret()
    store = StoreServer(secret).start()
    command = [sys.executable, "-m", "outcore", "train", str(config)]
    processes: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: Any) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    handled = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in handled}
    try:
        for rank in range(ranks):
            environment = {**os.environ, **rank_variables(rank, ranks, store, secret), **command_variable()}
            processes.append(subprocess.Popen(command, env=environment, process_group=0))
        return _wait(processes, store)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _end(processes)
        store.close()


def _wait(processes: Sequence[subprocess.Popen[bytes]], store: StoreServer) -> int:
    """Until all are done, or one has failed."""
    stopped = StoppedRanks([process.pid for process in processes], store)
    while True:
        codes = [process.poll() for process in processes]
        failed = next(((rank, code) for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            rank, code = failed
            when = "" if store.find(f"beat/{rank}") is not None else " while starting"
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            said = f"rank {rank} {how}{when}; all {len(processes)} ranks end"
            if code < 0:  # it could not say so itself
                print(f"outcore: {said}", file=sys.stderr, flush=True)
            store.fail(said)
            _end(processes)
            return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        if (why := stopped.found()) is not None:
            print(f"outcore: {why}; all {len(processes)} ranks end", file=sys.stderr, flush=True)
            store.fail(why)
            _end(processes)
            return 1
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
