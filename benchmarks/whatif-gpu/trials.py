"""Trains every network as it is and with every technique, and with shares of the GPU; writes what was measured.

    python benchmarks/whatif-gpu/trials.py techniques OUT.jsonl SECONDS [NETWORK,...] [--known ROWS.jsonl]
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50 python benchmarks/whatif-gpu/trials.py shares OUT.jsonl SECONDS [NETWORK,...]
    python benchmarks/whatif-gpu/trials.py compiled OUT.jsonl SECONDS NETWORK     compiles, waits for a line, then times

One line per trial. A technique is trained in turn with the network as it is, whose trial stands in the same line
(`plain`). Lines of shares name the kernels that took the most time. Nothing is predicted here: `table.py` does that
from the lines, without a GPU. What OUT.jsonl or ROWS.jsonl has already is not run again.

Compilers take cores, and a step whose host shares its cores is timed wrongly. So all networks are compiled first, at
the same time and in processes of their own, which then wait: nothing is timed while one of them compiles, and they are
timed one after the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import networks
import torch

import outcore
from outcore.whatif.setup import TrainingSetup
from outcore.whatif.techniques import parse_techniques
from outcore.whatif.trial import run_in_turn, run_setup

COMPILING = 0.55
"""Share of the time for which compilers are waited for."""


def setup_of(job: outcore.Job, question: str) -> TrainingSetup:
    setup = TrainingSetup(job)
    for technique in parse_techniques(question) if question else ():
        setup = technique.setup(setup)
    return setup


def rates(device: str) -> dict[str, float]:
    """What this share of the device copies and multiplies."""
    if device == "cpu":
        return {}
    copied = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    into = torch.empty_like(copied)
    found = {"copy_bytes_per_s": 2 * copied.numel() / _seconds(lambda: into.copy_(copied))}
    for name, dtype in (("tf32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.randn(8192, 8192, device=device, dtype=dtype)
        found[name] = 2 * 8192**3 / _seconds(lambda a=a: a @ a)
    return found | {"sms": torch.cuda.get_device_properties(0).multi_processor_count}


def _seconds(call: Any, runs: int = 5) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(runs):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / runs


def kernels(setup: TrainingSetup, device: str, most: int = 24) -> dict[str, list[float]]:
    """Seconds and launches of a step by the name of a kernel, those that take the most time."""
    from torch.profiler import ProfilerActivity, profile

    from outcore.whatif.trial import _training_step

    step = _training_step(setup, torch.device(device))
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    sums: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_type.name == "CUDA":
            entry = sums.setdefault(event.name[:160], [0.0, 0])
            entry[0] += (event.time_range.end - event.time_range.start) * 1e-6
            entry[1] += 1
    return dict(sorted(sums.items(), key=lambda item: -item[1][0])[:most])


def trained(
    what: str, job: outcore.Job, question: str, device: str, ready: Callable[[], None] | None = None
) -> dict[str, Any]:
    """What a line says of a setup."""
    setup = setup_of(job, question)
    if what == "shares":
        found = asdict(run_setup(setup, device, seconds=0.25))
        return found | ({"kernels": kernels(setup, device)} if device == "cuda" else {})
    if not question:
        return asdict(run_setup(setup, device, seconds=0.4))
    plain, own = run_in_turn((setup_of(job, ""), setup), device, seconds=0.4, ready=ready)
    return asdict(own) | {"plain": asdict(plain)}


class Compilers:
    """Processes that compile a network each at the same time, and are timed one after the other."""

    def __init__(self, names: list[str], path: Path) -> None:
        self.open: dict[str, subprocess.Popen[str]] = {}
        self.ready: list[str] = []
        for name in names:
            command = [sys.executable, __file__, "compiled", str(path), "0", name]
            self.open[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait(self, until: float, *names: str) -> None:
        """Until all, or those that are named, have compiled or ended, or the time has come."""
        with selectors.DefaultSelector() as answers:
            for name, process in self.open.items():
                if name not in self.ready and (not names or name in names):
                    answers.register(process.stdout, selectors.EVENT_READ, name)
            while answers.get_map() and time.monotonic() < until:
                for key, _ in answers.select(max(0.0, until - time.monotonic())):
                    answers.unregister(key.fileobj)
                    if key.fileobj.readline() == "ready\n":
                        self.ready.append(key.data)
                        print("compiled", key.data, flush=True)
                    else:
                        self.open.pop(key.data).wait()
                        print("ended", key.data, flush=True)

    def hold(self) -> None:
        """Those that still compile stop, so that what is timed has the machine."""
        for name in self.open.keys() - set(self.ready):
            self.open[name].send_signal(signal.SIGSTOP)

    def time(self, name: str, until: float) -> bool:
        """Let one of them time its network; False if it was not ready by then."""
        process = self.open.get(name)
        if process is None:
            return False
        if name not in self.ready:
            process.send_signal(signal.SIGCONT)
            self.wait(until, name)
            if name not in self.ready:
                return False
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            process.communicate("go\n", timeout=max(1.0, until - time.monotonic()))
            del self.open[name]
            return process.returncode == 0
        return False

    def close(self) -> None:
        for process in self.open.values():
            process.kill()
            process.wait()


def compile_one(name: str, path: Path, device: str) -> None:
    """Compile, say so, wait for a line, time, and write."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is not an answer

    def ready() -> None:
        print("ready", file=answers, flush=True)
        if not sys.stdin.readline():
            raise SystemExit("nobody waits for this")

    write(path, measured("techniques", name, "compile", device, 100, ready))


def measured(
    what: str, name: str, question: str, device: str, share: int, ready: Callable[[], None] | None = None
) -> dict[str, Any]:
    torch.manual_seed(0)
    job = (networks.SHARES if what == "shares" else networks.VERIFIED)[name]
    row: dict[str, Any] = {"network": name, "question": question, "share": share}
    start = time.monotonic()
    try:
        row |= trained(what, job, question, device, ready)
    except Exception as error:  # one that fails must not end the others
        row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
    row["took_s"] = round(time.monotonic() - start, 2)
    if device == "cuda":
        torch.cuda.empty_cache()
    return row


def write(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    step, error = row.get("step_s"), row.get("error", "")
    print(row.get("network"), row.get("question"), row["share"], step, error, file=sys.stderr, flush=True)


def known(paths: list[Path]) -> set[tuple[str, str]]:
    """What was measured already."""
    found = [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
    return {(row["network"], row["question"]) for row in found if "step_s" in row}


def main() -> None:
    words = sys.argv[1:]
    before = [Path(words.pop(words.index("--known") + 1))] if "--known" in words else []
    words = [word for word in words if word != "--known"]
    what, path, limit_s = words[0], Path(words[1]), float(words[2])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    of = networks.SHARES if what == "shares" else networks.VERIFIED
    names = words[3].split(",") if len(words) > 3 else list(of)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    end = time.monotonic() + limit_s
    share = int(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))
    if what == "compiled":
        compile_one(names[0], path, device)
        return
    done = known([path, *before]) if what == "techniques" else set()
    questions = ("", "amp") if what == "shares" else None
    order = [o for n in names for q in questions or ("", *networks.QUESTIONS[n]) if (o := (n, q)) not in done]
    late = [name for name, question in order if question == "compile"]
    compilers = Compilers(late, path)
    try:
        compilers.wait(time.monotonic() + COMPILING * limit_s)
        compilers.hold()
        write(path, {"what": what, "share": share, "torch": torch.__version__, **rates(device)})
        for name, question in order:
            if question == "compile":
                continue
            if time.monotonic() > end:
                write(path, {"network": name, "question": question, "share": share, "error": "no time left"})
            else:
                write(path, measured(what, name, question, device, share))
        for name in sorted(late, key=lambda name: name not in compilers.ready):
            if not compilers.time(name, end):
                write(path, {"network": name, "question": "compile", "share": share, "error": "not compiled in time"})
    finally:
        compilers.close()


if __name__ == "__main__":
    main()
