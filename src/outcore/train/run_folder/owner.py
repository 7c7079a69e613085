"""One run folder, one owner: a file in it says which processes are at work there, and a second run is refused.

    runs/x/.owner    {"host": "node7", "boot": "…", "processes": [{"pid": 4711, "start": "8123"}], "since": "…"}

The file is made in one operation that fails if it is there. Whether its processes still live is known on their own host
by process id and start time (an id may have been given to another process since, or the computer started again), so the
lock of a run that was killed is in nobody's way. From another host neither can be seen; there the file counts for as
long as its owner touches it, every `_TOUCH_S`, by the clock of the file system both share. A launcher owns the folder,
and its first rank beside it: ranks that are about to save after their launcher was killed are still owners.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outcore.documents.reading import read_json
from outcore.documents.schema import ListOf, Record, Text, Whole
from outcore.errors import TrainError

__all__ = ["NAME", "owning"]

NAME = ".owner"
_TOUCH_S = 10.0
_STALE_AFTER_S = 60.0
_SCHEMA = Record(
    {
        "host": Text(),
        "boot": Text(),
        "since": Text(),
        "processes": ListOf(Record({"pid": Whole(least=1), "start": Text()}), 1),
    }
)


@contextlib.contextmanager
def owning(folder: Path, *, beside: int | None = None) -> Iterator[None]:
    """Own a run's folder while this is entered, or raise.

    Args:
        folder: that of the run; made if it is not there.
        beside: the process id of a launcher that owns the folder and started this process.

    Raises:
        TrainError: another run is at work there; says which.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainError(f"the run's folder {folder} cannot be made: {error.strerror}; say another --out") from None
    path = folder / NAME
    mine = {"pid": os.getpid(), "start": _start(os.getpid())}
    _take(path, mine, beside)
    stop = threading.Event()
    thread = threading.Thread(target=_touch, args=(path, stop), name="outcore owner", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        _leave(path, mine)


def _take(path: Path, mine: dict[str, Any], beside: int | None) -> None:
    for _ in range(10):
        document = {"host": socket.gethostname(), "boot": _boot(), "processes": [mine]}
        document["since"] = time.strftime("%Y-%m-%d %H:%M:%S")
        if _create(path, document):
            return
        there = _read(path)
        if there is None:  # gone meanwhile, or torn by a kill: nobody's
            path.unlink(missing_ok=True)
            continue
        if beside is not None and any(process["pid"] == beside for process in there["processes"]):
            _replace(path, there | {"processes": [*there["processes"], mine]})
            return
        if _is_alive(path, there):
            pids = ", ".join(str(process["pid"]) for process in there["processes"])
            raise TrainError(
                f"{path.parent} belongs to a run that is at work (process {pids} on {there['host']}, since "
                f"{there['since']}); wait for it or stop it, or say another --out"
            )
        # Of several that find a stale one, the one that moves it away goes on.
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_name(f"{NAME}.{os.getpid()}"))
            path.with_name(f"{NAME}.{os.getpid()}").unlink()
    raise TrainError(f"{path} changes while it is read; is another run starting? say another --out")


def _leave(path: Path, mine: dict[str, Any]) -> None:
    there = _read(path)
    if there is None or mine not in there["processes"]:
        return
    with contextlib.suppress(OSError):
        rest = [process for process in there["processes"] if process != mine]
        if any(_start(process["pid"]) == process["start"] for process in rest):
            _replace(path, there | {"processes": rest})
        else:
            path.unlink(missing_ok=True)


def _create(path: Path, document: dict[str, Any]) -> bool:
    """Make the file with its content at once; False if there is one."""
    aside = path.with_name(f"{NAME}.{os.getpid()}")
    aside.write_text(json.dumps(document) + "\n", encoding="utf-8")
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        _replace(path, document)
    finally:
        aside.unlink(missing_ok=True)
    return True


def _replace(path: Path, document: dict[str, Any]) -> None:
    aside = path.with_name(f"{NAME}.{os.getpid()}")
    aside.write_text(json.dumps(document) + "\n", encoding="utf-8")
    aside.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(read_json(path, _SCHEMA, TrainError))
    except TrainError:
        return None


def _is_alive(path: Path, there: dict[str, Any]) -> bool:
    if there["host"] == socket.gethostname():
        alive = [_start(process["pid"]) == process["start"] for process in there["processes"]]
        return there["boot"] == _boot() and any(alive)
    probe = path.with_name(f"{NAME}.{os.getpid()}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime < _STALE_AFTER_S
    except FileNotFoundError:
        return False
    finally:
        probe.unlink(missing_ok=True)


def _touch(path: Path, stop: threading.Event) -> None:
    while not stop.wait(_TOUCH_S):
        with contextlib.suppress(OSError):
            os.utime(path)


def _start(pid: int) -> str:
    """When a process started, as the system writes it; empty if there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return ""
    try:  # no /proc: alive or not is all that can be known
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "unknown"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
