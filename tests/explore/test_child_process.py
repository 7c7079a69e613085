"""Processes for a job's code: limits, groups, and nothing left when the one that started them is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outcore.explore.child_process import answer_of, end, spawn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")

CHILD = """\
import json, os, subprocess, sys, time
from outcore.explore.child_process import leave_with_parent

leave_with_parent()
asked = json.loads(sys.stdin.readline() or "{}")
if asked.get("does") == "answer":
    print(json.dumps({"twice": 2 * asked["number"]}))
elif asked.get("does") == "leave":
    sys.exit(7)
elif asked.get("does") == "print":
    print("no JSON")
elif asked.get("does") == "grow":
    kept = bytearray(b"x" * (600 << 20))
    time.sleep(60)
else:
    other = subprocess.Popen(["sleep", "60"])
    print(os.getpid(), other.pid, flush=True)
    time.sleep(60)
"""

PARENT = """\
import asyncio, sys
from outcore.explore.child_process import spawn

async def main():
    child = await spawn("child_of_a_test")
    child.stdin.write(b"{}\\n")
    print((await child.stdout.readline()).decode(), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child_of_a_test.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(*pids: int) -> bool:
    limit = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < limit:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.mark.parametrize(
    ("request_", "answer", "wrong"),
    [
        ({"does": "answer", "number": 4}, {"twice": 8}, ""),
        ({"does": "leave"}, None, "code 7"),
        ({"does": "print"}, None, "code 0"),
        pytest.param({"does": "grow"}, None, "memory of", marks=pytest.mark.slow),
        pytest.param({"does": "block"}, None, "time", marks=pytest.mark.slow),
    ],
)
def test_a_process_answers_or_is_ended_with_a_word(request_: dict[str, object], answer: object, wrong: str) -> None:
    seconds = 1.0 if wrong == "time" else 30.0
    found, said = asyncio.run(answer_of("child_of_a_test", request_, seconds=seconds, most_bytes=400 << 20))
    assert found == answer and said.startswith(wrong) and bool(said) == bool(wrong)


def test_what_a_process_started_ends_with_it() -> None:
    async def session() -> tuple[int, int]:
        child = await spawn("child_of_a_test")
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(b"{}\n")
        own, other = map(int, (await child.stdout.readline()).split())
        assert own == child.pid and alive(own) and alive(other)
        await end(child)
        await end(child)  # once more does no harm
        return own, other

    assert gone(*asyncio.run(session()))


def test_a_process_ends_when_the_one_that_started_it_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        own, other = map(int, parent.stdout.readline().split())
        assert alive(own)
        parent.send_signal(signal.SIGKILL)
    assert gone(own)
    if alive(other):
        os.kill(other, signal.SIGKILL)  # what a job's process has started is its own to end
