"""Ranks started by one command: what they are told, and what becomes of a signal."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

from outcore.run.launch import rank_variables
from outcore.run.rendezvous import StoreServer

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


def test_keys_pressed_once_are_heard_once_by_every_rank(tmp_path: Path) -> None:
    rank = tmp_path / "rank"
    rank.write_text(COUNTING)
    rank.chmod(rank.stat().st_mode | stat.S_IXUSR)
    program = f"import sys\nfrom outcore.train.launch import launch\nsys.executable = {str(rank)!r}\n"
    program += f"sys.exit(launch({str(tmp_path / 'run.yaml')!r}, 2))"
    done = subprocess.run([sys.executable, "-c", program], start_new_session=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"heard-{k}").read_text() for k in range(2)] == ["1", "1"]


def test_a_rank_is_told_what_torchrun_would_tell_it_and_the_secret() -> None:
    store = StoreServer("s" * 32)
    told = rank_variables(1, 2, store, "s" * 32)
    assert (told["RANK"], told["WORLD_SIZE"], told["MASTER_PORT"]) == ("1", "2", str(store.port))
    assert (told["MASTER_ADDR"], told["OUTCORE_SECRET"]) == ("127.0.0.1", "s" * 32)
    store.close()
