"""Workers that block or take too much memory are ended with a word; the last pieces stay, and the next one works."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from outcore.errors import OutcoreError
from outcore.explore.parts import ExploreSettings
from outcore.explore.supervisor import Supervisor, WorkerLimits
from tests.explore.jobs import SMALL, write

pytestmark = pytest.mark.slow

SLEEPS = ["sleep", "77777"]
"""A process that a job leaves behind."""


def running(words: str) -> list[str]:
    """Processes whose command has some words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if words.encode() in path.read_bytes() else []
    return found


async def settled(supervisor: Supervisor, limit_s: float = 90) -> None:
    """Wait until a job was looked at, or failed."""
    async with asyncio.timeout(limit_s):
        while supervisor.status["kind"] == "busy":
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("does", "limits", "said"),
    [
        ("import time; time.sleep(1000)", WorkerLimits(first_s=8.0), "not recorded within 8 s"),
        ("torch.ones(2_000_000_000, device='cpu')", WorkerLimits(memory_bytes=2 << 30), "it may take 2.0 GiB"),
        (
            "kept = [bytes(bytearray(b'x' * (64 << 20))) for _ in range(90)]",
            WorkerLimits(memory_bytes=2 << 30),
            "it may take",
        ),
        ("import os; os.abort()", WorkerLimits(), "exit code -6"),
        (
            "import subprocess, time; subprocess.Popen(['sleep', '77777']); time.sleep(99)",
            WorkerLimits(first_s=8.0),
            "within 8",
        ),
    ],
)
def test_limits_end_a_worker_and_the_last_pieces_stay(
    tmp_path: Path, does: str, limits: WorkerLimits, said: str
) -> None:
    path = write(tmp_path)

    async def session() -> None:
        settings = ExploreSettings(str(path), machine="v100", seconds=0.5, search_s=0.02)
        supervisor = Supervisor(settings)
        try:
            await supervisor.start()
            await settled(supervisor)
            assert supervisor.trouble is None and supervisor.pieces["plans"]["complete"]
            before = supervisor.pieces["about"]

            path.write_text(SMALL.replace("    return Net()", f"    {does}\n    return Net()"))
            supervisor.limits = limits
            await supervisor.start()
            await settled(supervisor)
            assert supervisor.trouble is not None and said in supervisor.trouble["message"]
            assert supervisor.pieces["about"] == before
            with pytest.raises(OutcoreError):
                await supervisor.simulate({}, {"first": "recompute"})

            path.write_text(SMALL)
            supervisor.limits = WorkerLimits()
            await supervisor.start()
            await settled(supervisor)
            assert supervisor.trouble is None
            changed = await supervisor.simulate({}, {"first": "recompute"})
            assert changed["over_plain"] > 1 and changed["document"]["policy"]
            with pytest.raises(OutcoreError, match="no block 'nothing'"):
                await supervisor.simulate({}, {"nothing": "recompute"})
        finally:
            await supervisor.close()
        assert not running("\0".join(SLEEPS))

    asyncio.run(session())
