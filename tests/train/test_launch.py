"""Ranks started by one command: what they are told, and what becomes of a signal."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outcore.run.ranks.launch import rank_variables
from outcore.run.ranks.store import StoreServer
from tests.foreign.sample import sometimes

from .running import write_job

COUNTING = f"""#!{sys.executable}
import os, signal, sys, time
from pathlib import Path

heard = []
signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
here = Path(sys.argv[-1]).parent
(here / f"ready-{{os.environ['RANK']}}").touch()
while len(list(here.glob("ready-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    launcher = os.getppid()
    os.kill(launcher, signal.SIGSTOP)  # two signals that come together are one; so it passes them on later
    os.killpg(os.getpgid(launcher), signal.SIGINT)
    time.sleep(0.2)
    os.kill(launcher, signal.SIGCONT)
while not heard:
    time.sleep(0.01)
time.sleep(0.5)  # for one too many
(here / f"heard-{{os.environ['RANK']}}").write_text(str(len(heard)))
"""


@sometimes
def test_keys_pressed_once_are_heard_once_by_every_rank(tmp_path: Path) -> None:
    rank = tmp_path / "rank"
    rank.write_text(COUNTING)
    rank.chmod(rank.stat().st_mode | stat.S_IXUSR)
    program = (
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in the background
    )
    program += f"from outcore.train.launch import launch\nsys.executable = {str(rank)!r}\n"
    program += f"sys.exit(launch({str(tmp_path / 'run.yaml')!r}, 2))"
    done = subprocess.run([sys.executable, "-c", program], start_new_session=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"heard-{k}").read_text() for k in range(2)] == ["1", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_ranks_that_others_start_meet_by_the_users_secret(tmp_path: Path, launcher: str) -> None:
    job = write_job(tmp_path)
    job.write_text(job.read_text().replace("nn.Dropout(0.3), nn.BatchNorm1d(16), ", ""))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(tmp_path / "settings")}
    train = ["-m", "outcore", "train", "job.py", "--device", "cpu", "--out", "run"]
    if launcher == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        commands = [([sys.executable, *torchrun, *train], environment)]
    else:
        ranks = [{"OMPI_COMM_WORLD_RANK": str(k), "OMPI_COMM_WORLD_SIZE": "2", "MASTER_PORT": port} for k in range(2)]
        commands = [([sys.executable, *train], environment | told) for told in ranks]
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(subprocess.Popen(command, env=told, cwd=tmp_path, stderr=subprocess.PIPE, text=True))
            for command, told in commands
        ]
        for process in started:
            said = process.communicate()[1]
            assert process.returncode == 0, said
    assert (tmp_path / "run" / "report.html").is_file()
    assert (tmp_path / "settings" / "outcore" / "secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_ranks_of_a_torchrun_that_is_killed_save_and_leave(tmp_path: Path) -> None:
    job = write_job(tmp_path, stop_at=(3,), how="os.environ['RANK'] == '0' and os.kill(os.getppid(), signal.SIGKILL)")
    job.write_text(job.read_text().replace("nn.BatchNorm1d(16), ", ""))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train = ["-m", "outcore", "train", "job.py", "--device", "cpu", "--out", "run", "--epochs", "100000"]
    with (tmp_path / "said").open("w") as said:
        subprocess.run([*torchrun, *train], cwd=tmp_path, stdout=said, stderr=said, timeout=200)
    owner, deadline = tmp_path / "run" / ".owner", time.monotonic() + 60
    while owner.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not owner.exists(), (tmp_path / "said").read_text()  # rank 0 is gone, and not by force
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_rank_is_told_what_torchrun_would_tell_it_and_the_secret() -> None:
    store = StoreServer("s" * 32)
    told = rank_variables(1, 2, store, "s" * 32)
    assert (told["RANK"], told["WORLD_SIZE"], told["MASTER_PORT"]) == ("1", "2", str(store.port))
    assert (told["MASTER_ADDR"], told["OUTCORE_SECRET"]) == ("127.0.0.1", "s" * 32)
    store.close()
