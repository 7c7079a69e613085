"""Runs of quick tests in a copy of the repository: watched, to know what each test reaches, and on a defect.

Tests run in a fork of this process, which has torch and the rest imported already. A mutant is tried on the tests that
reach its block alone, the shortest of its own package first and then those of others, until one fails. Three ends:
*killed* (a test failed or ran out of time), *survived* (all passed), *unreached* (no quick test reaches the block).
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.mutation import reach
from tests.mutation.defects import LOOSE, Mutant
from tests.suite import KERNELS

ROOT = Path(__file__).parents[2]
NOT_FOUND, NO_TESTS = 4, 5  # pytest's exit status where a test is not there, and where everything was deselected
PASSED_OR_NOT = (0, 1, NO_TESTS)
CLAIMED_S = 300.0
TOGETHER = 3
"""So many files of tests are watched in one process: several processes share the work."""


class Tests:
    """The quick tests in a copy of the repository, and what is known of them."""

    def __init__(self, tree: Path, records: Path, folders: list[str]) -> None:
        self.tree, self.changes, self.reach = tree.resolve(), 0, reach.Reach()
        copy(self.tree)
        self.records = reach.records(self.tree, folders, LOOSE, records.resolve())

    def watch(self, until: float, file_s: float) -> bool:
        """Find out what the tests reach that have changed since it was asked; false where the time was too short."""
        marks = None
        by_folder = defaultdict(list)
        for file, stored in self.records.items():
            if not stored.exists():
                by_folder[Path(file).parent].append(file)
        for files in [some[i : i + TOGETHER] for some in by_folder.values() for i in range(0, len(some), TOGETHER)]:
            if time.monotonic() > until:
                return False
            claim = self.records[files[0]].with_suffix(".claim")  # another process may be at the same work
            if claim.exists() and time.time() - claim.stat().st_mtime < CLAIMED_S:
                continue
            if self.records[files[0]].exists():  # it has done it since
                continue
            claim.touch()
            marks = marks or reach.Marks(self.tree / "src" / "outcore", self.tree / "marks" / "bytes")
            os.environ |= reach.environment(marks)
            began, kernels = time.monotonic(), any(file.startswith(KERNELS) for file in files)
            watch = partial(reach.Watch, marks, {file: self.records[file] for file in files}, file_s)
            code = self.call(["--continue-on-collection-errors", *files], 1800, watch, kernels)
            del os.environ["MUTATION_MARKS"]
            print(f"{time.monotonic() - began:6.1f} s  {files[0]} ...: {' '.join(self.said()[-1:])}", flush=True)
            left_out = [line for line in self.said() if line.startswith(("FAILED", "ERROR"))]
            print("".join(f"  left out: {line}\n" for line in left_out), end="")
            if code not in PASSED_OR_NOT:  # a process that died: what its tests reach is not known
                print("\n".join(f"  {line}" for line in [f"ended with {code}", *self.said()[-20:]]), flush=True)
                continue
            claim.unlink(missing_ok=True)
        return True

    def load(self) -> None:
        """Take what is known of the tests."""
        for stored in self.records.values():
            if stored.exists():
                self.reach.add(stored)

    def said(self) -> list[str]:
        """What the last run printed."""
        return (self.tree / "out.txt").read_text(errors="replace").splitlines()

    def call(
        self, arguments: list[str], time_s: float, plugin: Callable[[], Any] | None = None, kernels: bool = False
    ) -> int | None:
        """Pytest's exit status; none if it took more seconds of a core, or four times as many on a busy machine."""
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (int(time_s) + 1, int(time_s) + 5))
            os.chdir(self.tree)
            out = os.open(self.tree / "out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            sys.path[:0] = [str(self.tree / "src"), str(self.tree)]
            for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
                del sys.modules[name]  # the copy has its own
            others = [p for p in os.environ.get("PYTHONPATH", "").split(":") if p not in ("", str(ROOT), f"{ROOT}/src")]
            os.environ["PYTHONPATH"] = ":".join([f"{self.tree}/src", str(self.tree), *others])
            which = "not gpu" if "::" in arguments[-1] and not self.reach.tests else "not slow and not gpu"
            if kernels:
                os.environ["TRITON_INTERPRET"] = "1"
            else:
                which += " and not kernel"
            code = 70
            try:
                import pytest

                reach.begin()
                code = int(pytest.main(["-m", which, "-p", "no:xdist", *arguments], [plugin()] if plugin else []))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        end = time.monotonic() + 4 * time_s
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                _end_group(child)
                code = os.waitstatus_to_exitcode(status)
                return None if code in (-signal.SIGXCPU, -signal.SIGKILL) else code
            time.sleep(0.02)
        _end_group(child)
        os.waitpid(child, 0)
        return None

    def chosen_for(self, mutant: Mutant, seconds: float) -> tuple[list[str], int]:
        """The shortest tests that reach its block, half of the time for its own package's; how many there are."""
        words = (self.tree / "src" / "outcore" / mutant.file).read_text()
        block = f"{mutant.file}:{reach.block_at(words, mutant.start)}"
        able = self.reach.tests.get(block, set())
        if not able and mutant.package == "kernels":  # Triton's interpreter reads a kernel's source by itself
            files = reach.importers(self.tree / "src" / "outcore", mutant.file)
            able = {t for name, tests in self.reach.tests.items() if name.partition(":")[0] in files for t in tests}
            able = {t for t in able if t.startswith(KERNELS)}
        times, chosen, total = self.reach.seconds, list[str](), 0.0
        own = {name for name in able if name.startswith(f"tests/{mutant.package}/")}
        for names, limit in ((own, seconds / 2), (able, seconds)):
            for name in sorted(names - set(chosen), key=lambda name: (times[name], name)):
                if chosen and total + times[name] > limit:
                    break
                chosen.append(name)
                total += times[name]
        return chosen, len(able)

    def try_out(self, mutant: Mutant, seconds: float) -> None:
        """Put the defect in, run tests that reach it, take it out."""
        chosen, able = ([mutant.tests], 1) if mutant.tests else self.chosen_for(mutant, seconds)
        total = sum(self.reach.seconds.get(name, 20.0) for name in chosen)
        if not chosen:
            mutant.end = "unreached"
            return
        path = self.tree / "src" / "outcore" / mutant.file
        right, stat = path.read_bytes(), path.stat()
        path.write_bytes(right[: mutant.start] + mutant.text.encode() + right[mutant.stop :])
        self.changes += 1  # a time of its own for each content: compiled modules are known by it
        os.utime(path, (stat.st_mtime, int(time.time()) + 10 * self.changes))
        began = time.monotonic()
        kernels = any(name.startswith(KERNELS) for name in chosen)
        try:
            code = self.call(["-x", "--tb=line", *chosen], 15 + 3 * total, kernels=kernels)
        finally:
            path.write_bytes(right)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        mutant.time_s = round(time.monotonic() - began, 1)
        collected = not any("ERROR collecting" in line for line in self.said())  # a defect may break a module of tests
        failed = [line for line in self.said() if line.startswith(("FAILED", "ERROR"))]
        mutant.end = "survived" if code == 0 else "killed"
        mutant.by = "time" if code is None else (failed[0][:160] if failed else f"{len(chosen)} of {able} tests")
        if code in (NOT_FOUND, NO_TESTS) and collected:  # with the defect the tests have other names
            mutant.end, mutant.by = "survived", "its tests were not found"


def _end_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def copy(target: Path) -> None:
    """The tracked files and those that are new, of which only what has changed is copied again.

    Where git does not know them (an unpacked archive), all but what lies in hidden folders, environments and dist.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = asked.stdout.splitlines()
    if asked.returncode:
        tops = [p for p in ROOT.iterdir() if not p.name.startswith(".") and p.name not in ("dist", "build", "shared")]
        paths = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*"))]
        names = [str(path.relative_to(ROOT)) for path in paths if "__pycache__" not in path.parts]
    names = [name for name in names if (ROOT / name).is_file()]
    for old in [p for part in ("src", "tests") for p in (target / part).rglob("*.py")]:
        if str(old.relative_to(target)) not in names:
            old.unlink()
    for name in names:
        there = target / name
        if not there.exists() or there.read_bytes() != (ROOT / name).read_bytes():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, there)
    (target / "sitecustomize.py").write_text(reach.HOOK)
