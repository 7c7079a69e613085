"""Runs that are killed, stopped and orphaned: each ends in bounded time, names its culprit, and goes on bit for bit."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.foreign.sample import rotating

from .running import same, weights, write_job

ROOT = Path(__file__).parents[2]
BOUND_S = 180.0
"""Within which a run with a stopped rank has ended on a busy machine; outcore's own bounds add up to 60 s."""


def kill_at_every(folder: Path, stride: int, first: int = 1) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.train.killing", str(folder), str(stride), str(first)]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_run_killed_at_some_of_its_file_operations_goes_on(tmp_path: Path) -> None:
    found = kill_at_every(tmp_path, 200, *rotating(range(1, 201), 1))  # others with every commit
    assert found["wrong"] == [] and found["operations"] > 100 and found["kills"] > 0


@pytest.mark.slow
def test_a_run_killed_at_any_of_its_file_operations_goes_on(tmp_path: Path) -> None:
    assert kill_at_every(tmp_path, 1)["wrong"] == []


# Kills at random moments, of any rank and of the launcher, under all schedules.

KILLS = int(os.environ.get("OUTCORE_KILLS", "8"))
"""How many; more of them are other moments."""
STAGES = {1: [[""]], 2: [["0", "1"], ["2", "3"]], 3: [["0"], ["1", "2"], ["3"]], 4: [["0"], ["1"], ["2"], ["3"]]}


def write_slow_job(folder: Path) -> Path:
    job = write_job(folder)
    text = job.read_text().replace("nn.Dropout(0.3), nn.BatchNorm1d(16), ", "nn.Linear(16, 16), ")
    text = text.replace("import os, signal", "import os, signal, time").replace("CALLS += 1", "time.sleep(0.02)")
    job.write_text(text)
    return job


def start(folder: Path, out: str, ranks: int, schedule: str) -> subprocess.Popen[str]:
    from outcore.job import Job

    graph = Job.load(str(folder / "job.py")).capture().fingerprint
    plan = {"format": 1, "graph": graph, "stages": STAGES[ranks], "schedule": schedule, "micro_batches": 2}
    if schedule == "gems":
        plan |= {"micro_batches": 1, "batches": 2}
    (folder / "plan.json").write_text(json.dumps(plan))
    options = ["--ranks", str(ranks), "--device", "cpu", "--epochs", "2", "--batch", "4", "--out", out]
    command = [sys.executable, "-m", "outcore", "train", "job.py", *options, "plan.file=plan.json"]
    told: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": folder}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, "checkpoint.every_steps=2"], start_new_session=True, env=environment, **told)


def ranks_of(launcher: int) -> dict[int, int]:
    """Process ids of a launcher's ranks, by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == launcher:
                pairs = (entry.partition("=") for entry in (path / "environ").read_text().split("\0"))
                found[int({name: value for name, _, value in pairs}["RANK"])] = int(path.name)
        except (OSError, KeyError, ValueError):
            continue
    return found


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@functools.cache
def straight(ranks: int, schedule: str) -> dict[str, torch.Tensor]:
    """Weights of the run that nobody disturbs: the same for every kill of these ranks under this schedule."""
    with tempfile.TemporaryDirectory() as folder:
        write_slow_job(Path(folder))
        run = start(Path(folder), "run", ranks, schedule)
        text = run.communicate()[0]
        assert run.returncode == 0, text
        return weights(Path(folder) / "run")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(KILLS))
def test_a_rank_or_launcher_killed_or_stopped_at_any_moment(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    ranks = drawn.choice([1, 2, 2, 3, 4])
    schedule = drawn.choice(["model_parallel", "gpipe", "1f1b", "gems" if ranks % 2 == 0 else "gpipe"])
    how = drawn.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    victim = drawn.choice(["launcher", *range(ranks)]) if ranks > 1 else "launcher"  # one rank is the command itself
    write_slow_job(tmp_path)
    expected = straight(ranks, schedule)
    run = start(tmp_path, "run", ranks, schedule)
    while len(processes := ranks_of(run.pid) if ranks > 1 else {0: run.pid}) < ranks:
        assert run.poll() is None
        time.sleep(0.02)
    steps = tmp_path / "run" / "steps.csv"
    moment = drawn.choice([0.0, 1.0, None, None, None])  # while starting, or in the middle of steps
    if moment is None:
        while not steps.exists() and run.poll() is None:
            time.sleep(0.02)
        moment = drawn.random()
    time.sleep(moment)
    target = run.pid if victim == "launcher" else processes[victim]
    try:
        os.kill(target, how)
    except ProcessLookupError:
        pytest.skip("the run was over before")
    if ranks == 1 and how == signal.SIGSTOP:
        assert_it_waits_for_its_owner(run, tmp_path)
    began = time.monotonic()
    while not all(ended(pid) for pid in processes.values() if pid != target or how == signal.SIGKILL):
        assert time.monotonic() - began < BOUND_S, (victim, how, processes)
        time.sleep(0.05)
    if victim == "launcher" and how == signal.SIGSTOP:
        os.kill(run.pid, signal.SIGCONT)
    said = run.communicate(timeout=BOUND_S)[0]
    assert all(ended(pid) for pid in processes.values())
    if victim != "launcher" and run.returncode:
        assert f"rank {victim}" in said, said
    again = start(tmp_path, "run", ranks, schedule)
    text = again.communicate(timeout=BOUND_S)[0]
    assert again.returncode == 0, text
    assert same(weights(tmp_path / "run"), expected)
    assert not list((tmp_path / "run").rglob(".*"))


def assert_it_waits_for_its_owner(run: subprocess.Popen[str], folder: Path) -> None:
    """A stopped run of one process cannot end itself; while it is stopped, nobody else trains in its folder."""
    if (folder / "run" / "steps.csv").exists() and run.poll() is None:
        second = start(folder, "run", 1, "gpipe")
        said = second.communicate(timeout=BOUND_S)[0]
        assert second.returncode != 0 and str(run.pid) in said, said
