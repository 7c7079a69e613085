"""Servers that are killed, or stopped, while a job runs: nothing of them is left; two at once do not meet."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("watchfiles")

from tests.explore.jobs import SMALL, write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="children are read from /proc"),
]

BLOCKS = SMALL.replace("    return Net()", "    import time; time.sleep(1000)\n    return Net()")


def serve(path: Path) -> tuple[subprocess.Popen[str], str]:
    command = (sys.executable, "-m", "outcore", "explore", str(path), "--on", "v100", "--no-open", "--seconds", "0")
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ, cwd=path.parent
    )
    assert started.stdout is not None
    line = started.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:\d+/\S+/", line)
    assert found is not None, line
    return started, found[0]


def close(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.wait()
    assert server.stdout is not None
    server.stdout.close()


def children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
        except (OSError, IndexError):
            continue
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def answer(address: str) -> int:
    try:
        with urllib.request.urlopen(address, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_server_that_ends_while_a_job_blocks_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    server, _ = serve(write(tmp_path, BLOCKS))
    try:
        end = time.monotonic() + 60
        while not (workers := children(server.pid)):
            assert time.monotonic() < end
            time.sleep(0.1)
        time.sleep(8 if how is signal.SIGKILL else 1)  # a worker that is killed before it has begun says nothing
        server.send_signal(how)
        server.wait(30)
        end = time.monotonic() + 30
        while any(map(alive, workers)):
            assert time.monotonic() < end, workers
            time.sleep(0.1)
    finally:
        close(server)


def test_two_jobs_at_once_have_their_own_pages(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (one, first), (two, second) = serve(write(tmp_path / "a")), serve(write(tmp_path / "b", name="other.py"))
    try:
        assert first != second and answer(first) == answer(second) == 200
        token, place = second.rstrip("/").rpartition("/")[2], first.rstrip("/").rpartition("/")[0]
        assert answer(f"{place}/{token}/") == 404  # the one's token does not open the other
        for address, name in ((first, "job.py"), (second, "other.py")):
            with urllib.request.urlopen(address, timeout=10) as response:
                assert f"<title>{name}</title>" in response.read().decode()
    finally:
        for server in (one, two):
            server.send_signal(signal.SIGINT)
            server.wait(30)
            close(server)
