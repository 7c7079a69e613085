"""Processes that run a job's code for the page or the editor: each in a group of its own, and never left behind.

A process is ended with all that it started, as one group. If this process is killed it cannot end anything: then the
kernel ends the child (`leave_with_parent`, on Linux), and everywhere else the end of its standard input does.
This file imports no torch: the language server's own process stays small.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

__all__ = ["answer_of", "end", "leave_with_parent", "resident_bytes", "spawn"]

_PR_SET_PDEATHSIG = 1
_EVERY_S = 0.25
_LONGEST = 1 << 28
"""Bytes of one line that a process writes."""


async def spawn(module: str, *, folder: str | None = None) -> asyncio.subprocess.Process:
    """Start ``python -m module`` with pipes."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, str(os.getpid())),
        cwd=folder,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        limit=_LONGEST,
        start_new_session=True,
    )


async def end(process: asyncio.subprocess.Process | None) -> None:
    """End a process and what it started, if they still run."""
    if process is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def answer_of(
    module: str, request: Any, *, seconds: float, most_bytes: int = 0, folder: str | None = None
) -> tuple[Any, str]:
    """What a process answers to one request, and a word if it does not.

    Args:
        module: run as ``python -m``; it reads JSON from standard input and writes JSON.
        request: what it is asked.
        seconds: it may take.
        most_bytes: it may hold; 0 for as many as it likes.
        folder: it runs in.

    Returns:
        The answer, None where there is none, and what was wrong then: ``time``, ``memory of N`` or ``code N``.
    """
    process = await spawn(module, folder=folder)
    talking = asyncio.ensure_future(process.communicate(json.dumps(request).encode()))
    waited = 0.0
    try:
        while not talking.done():
            await asyncio.wait({talking}, timeout=_EVERY_S)
            waited += _EVERY_S
            if most_bytes and (held := resident_bytes(process.pid)) > most_bytes:
                return None, f"memory of {held}"
            if waited > seconds and not talking.done():
                return None, "time"
        out, _ = talking.result()
        with contextlib.suppress(ValueError):
            return json.loads(out), ""
        return None, f"code {process.returncode}"
    finally:
        await end(process)
        if not talking.done():
            talking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await talking


def leave_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it, whose number was given, is gone."""
    parent = int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].isdigit() else None
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it was gone before it could be asked for
        os._exit(1)


def resident_bytes(pid: int) -> int:
    """What a process holds in memory; 0 where the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
