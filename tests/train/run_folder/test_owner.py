"""One run folder, one owner: a second run is refused, a killed one is in nobody's way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outcore.errors import TrainError
from outcore.train.run_folder import owner
from outcore.train.run_folder.owner import owning

HOLD = """
import sys, time
from pathlib import Path
from outcore.train.run_folder.owner import owning
with owning(Path(sys.argv[1])):
    print("owned", flush=True)
    time.sleep(120)
"""


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def hold(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "owned\n"
    return process


def test_a_second_run_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    process = hold(tmp_path)
    try:
        said = rf"belongs to a run that is at work \(process {process.pid} on .*since 20.*wait for it or stop it"
        with pytest.raises(TrainError, match=said), owning(tmp_path):
            pass
        assert names(tmp_path) == [owner.NAME]
    finally:
        process.kill()
        process.communicate()
    with owning(tmp_path):  # the owner was killed: its lock is stale
        assert json.loads((tmp_path / owner.NAME).read_text())["processes"][0]["pid"] == os.getpid()
    assert names(tmp_path) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 3}', '{"processes": []}', "\x00"])
def test_a_torn_lock_is_nobodys(tmp_path: Path, text: str) -> None:
    (tmp_path / owner.NAME).write_text(text)
    with owning(tmp_path):
        pass
    assert names(tmp_path) == []


def write(folder: Path, **changed: object) -> Path:
    with owning(folder):
        document = json.loads((folder / owner.NAME).read_text())
    (folder / owner.NAME).write_text(json.dumps(document | changed))
    return folder / owner.NAME


def test_an_id_that_another_process_has_now_is_stale(tmp_path: Path) -> None:
    write(tmp_path, processes=[{"pid": os.getpid(), "start": "1"}])
    with owning(tmp_path):
        pass
    write(tmp_path, boot="before the computer was started again")
    with owning(tmp_path):
        pass


def test_a_lock_of_another_host_counts_while_it_is_touched(tmp_path: Path) -> None:
    path = write(tmp_path, host="another")
    with pytest.raises(TrainError, match="on another"), owning(tmp_path):
        pass
    os.utime(path, (time.time() - 3600,) * 2)
    with owning(tmp_path):
        pass
    assert names(tmp_path) == []


def test_a_rank_owns_beside_its_launcher_and_after_it(tmp_path: Path) -> None:
    process = hold(tmp_path)
    with owning(tmp_path, beside=process.pid):
        process.send_signal(signal.SIGKILL)
        process.communicate()
        other = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], capture_output=True, text=True)
        assert other.returncode == 1 and str(os.getpid()) in other.stderr
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named_with_what_to_say(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(TrainError, match=r"file/run cannot be made: Not a directory; say another --out"),
        owning(tmp_path / "file/run"),
    ):
        pass
