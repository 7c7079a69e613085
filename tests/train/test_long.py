"""Runs as long as people have them: ten thousand steps that are killed again and again, and the log of a day.

    pytest tests/train/test_long.py -s

prints times, memory and sizes of files; what is asserted are the weights, the logs and what may not grow.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outcore.report.run import MOST_POINTS, run_bundle

from .running import same, table, weights, write_job

pytestmark = pytest.mark.slow

EPOCHS, STEPS, KILLS = 50, 200, int(os.environ.get("OUTCORE_LONG_KILLS", "25"))
DATA = "torch.randn(24 if split"


def start(folder: Path, out: str) -> subprocess.Popen[str]:
    words = ["--device", "cpu", "--epochs", str(EPOCHS), "--batch", "2", "--out", out, "checkpoint.every_steps=50"]
    command = [sys.executable, "-m", "outcore", "train", "job.py", *words]
    told: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": folder}
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **told)


def rows_of(log: Path) -> int:
    return log.read_bytes().count(b"\n") - 1 if log.exists() else 0


def held_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) / 1024
    except (OSError, StopIteration):
        return 0.0


def test_ten_thousand_steps_killed_every_few_hundred_go_on_bitwise(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    job.write_text(job.read_text().replace(DATA, f"torch.randn({2 * STEPS} if split"))
    began = time.monotonic()
    whole, held = start(tmp_path, "straight"), []
    while whole.poll() is None:
        if rows_of(tmp_path / "straight" / "steps.csv") > EPOCHS * STEPS // 5:
            held.append(held_mib(whole.pid))
        time.sleep(0.5)
    said = whole.communicate()[0]
    assert whole.returncode == 0, said
    held = [n for n in held if n] or [0.0]
    print(f"{EPOCHS * STEPS:,} steps in {time.monotonic() - began:.0f} s; held {held[0]:.0f} to {max(held):.0f} MiB")
    assert max(held) < held[0] + 16
    drawn, log = random.Random(5), tmp_path / "run" / "steps.csv"
    began, killed = time.monotonic(), []
    while True:
        run = start(tmp_path, "run")
        until = rows_of(log) + drawn.randrange(2 * EPOCHS * STEPS // (KILLS + 1)) + 1
        while run.poll() is None and (len(killed) >= KILLS or rows_of(log) < until):
            time.sleep(0.02)
        if run.poll() is None:
            run.kill()
            killed.append(rows_of(log))
        said = run.communicate()[0]
        if run.returncode == 0:
            break
        assert run.returncode == -9, said
    print(f"killed {len(killed)} times, after {killed} steps: {time.monotonic() - began:.0f} s")
    assert len(killed) > KILLS // 2 and same(weights(tmp_path / "run"), weights(tmp_path / "straight"))
    for name in ("steps.csv", "epochs.csv"):
        assert table(tmp_path / "run" / name, "memory_bytes") == table(tmp_path / "straight" / name, "memory_bytes")
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "run").iterdir() if p.is_file()}
    checkpoints = [p for p in (tmp_path / "run" / "checkpoints").rglob("step-*") if p.is_dir()]
    print(f"files: {sizes}; {len(checkpoints)} checkpoints")
    assert rows_of(log) == EPOCHS * STEPS and sizes["steps.csv"] < 120 * EPOCHS * STEPS
    assert len(checkpoints) <= 8 and sizes["report.html"] < 2 << 20 and not list((tmp_path / "run").rglob(".*"))


def test_the_report_of_a_day_of_steps_is_small_and_takes_bounded_memory(tmp_path: Path) -> None:
    rows = 24 * 3600 * 50  # of 20 ms
    (tmp_path / "run.json").write_text(json.dumps({"ended": "finished"}))
    with (tmp_path / "steps.csv").open("w") as file:
        file.write("step,epoch,loss,learning_rate,gradient_norm,time_s,examples_per_s,memory_bytes\n")
        file.writelines(
            f"{n},{n // 1000},{9 if n == 1_234_567 else 0.5},0.001,,0.02,50.0,3363960\n" for n in range(rows)
        )
    size = (tmp_path / "steps.csv").stat().st_size / 2**20
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = run_bundle(tmp_path)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    steps = made["run"]["steps"]
    took = time.monotonic() - began
    print(f"{rows:,} rows of {size:.0f} MiB: {took:.0f} s, {grown:.0f} MiB, {len(steps['loss'])} points")
    assert len(steps["loss"]) <= MOST_POINTS + 2 and 9.0 in steps["loss"]
    assert len(json.dumps(made)) < 1 << 20 and grown < 1024
