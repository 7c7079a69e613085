"""Kill a run at each of its file operations, in processes that are forked from one that has imported everything.

    python -m tests.train.killing FOLDER STRIDE [FIRST]

counts the operations of a small run (files opened to be written, writes, renames, links, removals, directories, fsyncs
and checkpoint files), then for every STRIDE-th of them from FIRST on: begins the run anew, ends it with SIGKILL just
before that operation (in the middle of it, if it writes), and runs the same command again. Prints as JSON how many
operations and kills there were, and what went wrong.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outcore.run.checkpoint import files
from tests.train.running import run, same, table, weights, write_job

WORDS = ("train.epochs=2", "train.batch=3", "train.accumulate=2", "checkpoint.every_steps=2")
_EVENTS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "shutil.rmtree")


class Counter:
    """Counts file operations under a folder, and kills at one of them."""

    def __init__(self, folder: Path, kill_at: int) -> None:
        self.folder, self.kill_at, self.count = str(folder), kill_at, 0
        self.active = False

    def operation(self, half: Callable[[], Any] = lambda: None) -> None:
        """One more; `half` does a part of it."""
        if not self.active:
            return
        self.count += 1
        if self.count == self.kill_at:
            self.active = False
            half()
            os.kill(os.getpid(), signal.SIGKILL)

    def concerns(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.folder)

    def install(self) -> None:
        """Watch this process from now on."""
        real_open, real_fsync, real_save = io.open, os.fsync, files.save_file

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            made = real_open(file, mode, *args, **kwargs)
            writes = any(letter in mode for letter in "wax+")
            return Written(made, self) if writes and self.active and self.concerns(file) else made

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if not self.active:
                return
            writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if (event in _EVENTS or writes) and self.concerns(args[0]):
                self.operation()

        def fsync(handle: int) -> None:
            self.operation()
            real_fsync(handle)

        def save_file(tensors: Any, path: Path) -> None:
            def half() -> None:
                real_save(tensors, path)
                os.truncate(path, path.stat().st_size // 2)

            self.operation(half)
            real_save(tensors, path)

        io.open = builtins.open = opened  # type: ignore[assignment]
        os.fsync, files.save_file = fsync, save_file
        sys.addaudithook(hook)
        self.active = True


class Written:
    """A file whose writes are counted; the one that is killed has written half."""

    def __init__(self, file: Any, counter: Counter) -> None:
        self._file, self._counter = file, counter

    def write(self, text: Any) -> Any:
        def half() -> None:
            self._file.write(text[: len(text) // 2])
            self._file.flush()

        self._counter.operation(half)
        return self._file.write(text)

    def __enter__(self) -> Written:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def in_a_fork(function: Callable[[], Any]) -> tuple[int, Any]:
    """What a function returned in a process of its own, and how that ended."""
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(read)
        code = 1
        try:
            warnings.simplefilter("ignore")
            os.write(write, json.dumps(function()).encode())
            code = 0
        except BaseException as error:
            os.write(write, json.dumps(f"{type(error).__name__}: {error}").encode())
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), json.loads(said) if said else None


def main(folder: Path, stride: int, first: int = 1) -> list[str]:
    """Kill and go on; what went wrong."""
    torch.set_num_threads(1)
    job = write_job(folder)
    straight, out = folder / "straight", folder / "run"

    def train(kill_at: int, where: Path) -> tuple[int, str, int]:
        counter = Counter(where, kill_at)
        counter.install()
        code, said = run(job, where, *WORDS)
        return code, said, counter.count

    code, answer = in_a_fork(lambda: train(-1, straight))
    assert code == 0, answer
    operations = answer[2]
    wanted, wrong, numbers = weights(straight), [], range(first, operations + 1, stride)
    for number in numbers:
        shutil.rmtree(out, ignore_errors=True)
        code, said = in_a_fork(lambda number=number: train(number, out))  # type: ignore[misc]
        if code != -signal.SIGKILL:
            wrong.append(f"{number}: was not killed: {code} {said}")
            continue
        code, said = in_a_fork(lambda: train(-1, out))
        if code or said[0]:
            wrong.append(f"{number}: the same command ended with {code}: {said}")
            continue
        left = [str(p.relative_to(out)) for p in out.rglob(".*")]
        logs = all(
            table(out / f, "memory_bytes") == table(straight / f, "memory_bytes") for f in ("steps.csv", "epochs.csv")
        )
        if left or not logs or not same(weights(out), wanted):
            wrong.append(f"{number}: left {left}, logs {'the same' if logs else 'differ'}")
    print(json.dumps({"operations": operations, "kills": len(numbers), "wrong": wrong}))
    return wrong


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
