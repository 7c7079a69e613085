"""Runs over several hosts, which are network namespaces: a slow link, a late host, one that is cut off in a step.

Most take tens of seconds, and so are slow tests; without root or namespaces all are skipped, with a word.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.run.ranks.host_training import losses_of_plain

ROOT = Path(__file__).parents[3]
SILENT_S = 6.0
"""After which a rank that is not heard of is given up; 30 s outside of tests."""
ENDS_S = SILENT_S + 45.0
"""Within which every rank has ended; on an idle machine a third of it."""


def _hosts() -> ModuleType:
    """The code that makes namespaces, which lies with the benchmark that measures links."""
    path = ROOT / "benchmarks" / "whatif-links" / "hosts.py"
    spec = importlib.util.spec_from_file_location("namespace_hosts", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


namespaces = _hosts()
WHY_NOT = namespaces.unavailable()
need_namespaces = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")


class Process:
    """A rank, or torchrun, on a host; what it says is kept."""

    def __init__(self, host: str, words: list[str], variables: dict[str, str]) -> None:
        path = f"{ROOT / 'src'}:{ROOT}"
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"} | variables
        env["OUTCORE_SECRET"] = "0123456789abcdef" * 4
        command = namespaces.on_host(host, *words)
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
        )
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    def until_step(self, step: int, within_s: float = 180.0) -> None:
        end = time.monotonic() + within_s
        while not any(row.get("step", 0) >= step for row in self.rows()):
            assert time.monotonic() < end and self.process.poll() is None, self.text
            time.sleep(0.05)

    def ended(self, within_s: float) -> int:
        try:
            found = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end within {within_s:.0f} s:\n{self.text}")
        self._thread.join(5.0)
        return found

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._thread.join(10.0)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def _on(count: int, rate_mbit: float = 1000.0) -> Iterator[tuple[list[str], list[Process]]]:
    """Hosts, and the processes that were started on them, which are ended at the end."""
    started: list[Process] = []
    with namespaces.hosts(count, rate_mbit, prefix=f"oct{os.getpid()}x") as names:
        try:
            yield names, started
        finally:
            for process in started:
                process.kill()


def _rank(host: str, rank: int, size: int, given: dict[str, Any]) -> Process:
    """One rank as mpirun would start it."""
    words = [sys.executable, str(ROOT / "tests" / "run" / "ranks" / "host_training.py"), json.dumps(given)]
    variables = {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "MASTER_ADDR": namespaces.address(0),
        "MASTER_PORT": "29533",
    }
    return Process(host, words, variables)


def _given(**more: Any) -> dict[str, Any]:
    return {"steps": 4, "kind": "grid", "silent_after_s": SILENT_S, "path": None} | more


def test_it_is_said_why_there_are_no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert namespaces.unavailable() == "network namespaces need root"
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert "cannot be made" in namespaces.unavailable()


@need_namespaces
def test_two_hosts_train_as_one_process() -> None:
    with _on(2) as (names, started):
        started += [_rank(name, rank, 2, _given(steps=2)) for rank, name in enumerate(names)]
        for process in started:
            assert process.ended(120.0) == 0, process.text
            losses = [row["loss"] for row in process.rows() if "loss" in row]
            assert losses == pytest.approx(losses_of_plain(2), rel=1e-10)


@pytest.mark.slow
@need_namespaces
@pytest.mark.parametrize(("kind", "count", "rate_mbit"), [("grid", 2, 20.0), ("grid", 3, 1000.0), ("stages", 3, 20.0)])
def test_hosts_train_as_one_process_over_a_slow_link_and_with_one_late(kind: str, count: int, rate_mbit: float) -> None:
    with _on(count, rate_mbit) as (names, started):
        for rank in range(count):
            if rank == count - 1:
                time.sleep(4.0)
            started.append(_rank(names[rank], rank, count, _given(kind=kind)))
        for process in started:
            assert process.ended(240.0) == 0, process.text
            losses = [row["loss"] for row in process.rows() if "loss" in row]
            assert losses == pytest.approx(losses_of_plain(4), rel=1e-10)


@pytest.mark.slow
@need_namespaces
@pytest.mark.parametrize(("kind", "count", "cut"), [("grid", 2, 1), ("stages", 3, 1), ("grid", 2, 0)])
def test_a_host_that_is_cut_off_in_a_step_is_named_and_all_end(kind: str, count: int, cut: int) -> None:
    with _on(count) as (names, started):
        given = _given(kind=kind, steps=100_000)
        started += [_rank(name, rank, count, given) for rank, name in enumerate(names)]
        for process in started:
            process.until_step(3)
        namespaces.cut_off(names[cut])
        began = time.monotonic()
        for rank, process in enumerate(started):
            assert process.ended(max(1.0, began + ENDS_S - time.monotonic())) != 0
            if rank != cut:
                assert f"rank {cut}" in process.text.splitlines()[-1], process.text
        print(f"{kind} on {count}, host {cut} cut off: all ended after {time.monotonic() - began:.1f} s")


@pytest.mark.slow
@need_namespaces
def test_a_host_that_never_comes_is_named() -> None:
    with _on(2) as (names, started):
        started.append(_rank(names[0], 0, 2, _given(timeout_s=8.0)))
        assert started[0].ended(240.0) != 0
        assert "rank 1 of 2 has not come within 8 s" in started[0].text, started[0].text


@pytest.mark.slow
@need_namespaces
def test_what_is_left_of_the_hosts_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    """Under an elastic torchrun: two hosts, of which the second is cut off; the first begins again by itself."""
    given = _given(steps=60, path=str(tmp_path / "saved"), pause_s=0.2)
    script = str(ROOT / "tests" / "run" / "ranks" / "host_training.py")
    with _on(2) as (names, started):
        for number, name in enumerate(names):
            words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
            words += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "hosts"]
            words += ["--rdzv-endpoint", f"{namespaces.address(0)}:29544", "--local-addr", namespaces.address(number)]
            words += ["--rdzv-conf", "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=4"]
            started.append(Process(name, [*words, script, json.dumps(given)], {}))
            time.sleep(1.0)
        started[0].until_step(5)
        assert any(row.get("ranks") == 2 for row in started[0].rows()), started[0].text
        namespaces.cut_off(names[1])
        assert started[0].ended(300.0) == 0, started[0].text
        begun = [row for row in started[0].rows() if "begins" in row]
        assert begun[-1]["ranks"] == 1 and begun[-1]["begins"] >= 4, begun
        losses = {row["step"]: row["loss"] for row in started[0].rows() if "loss" in row}
        assert [losses[n + 1] for n in range(60)] == pytest.approx(losses_of_plain(60), rel=1e-8)
