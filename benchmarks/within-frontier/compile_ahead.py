"""Compile cases for `run.py`, several beside each other, each in a process of its own.

    python compile_ahead.py --out compiled/ [--only densenet121,inception_v3] [--processes 7] [--limit 150]

In a first step the fastest variants of kernels are chosen, so these are made one after the other, on a quiet device.
What is there already is not compiled again; what is not finished in time is left out, and its kernels are found again
in its scratch folder the next time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking whether there is a GPU must not open it before the fork

import cases  # noqa: E402
import torch  # noqa: E402
from cases import Case, cases_of  # noqa: E402
from compiled import Compiled  # noqa: E402
from gate import children  # noqa: E402
from networks import torchvision  # noqa: E402

FIRST = ("densenet121", "inception_v3", "resnet50", "convnext_tiny", "unet", "vgg19")
"""What takes longest is compiled first."""
READ = (".ttir", ".ttgir", ".llir", ".ptx", ".source")
"""What Triton writes beside a kernel for people to read, nine tenths of it; a kernel is launched without."""


def slim() -> None:
    """Keep kernels without what is only read."""
    from torch._inductor.triton_bundler import TritonBundler

    inner = TritonBundler.collect

    def collect() -> Any:
        for entry in getattr(TritonBundler, "_entries", None) or ():
            for path in Path(entry.directory, entry.kernel_hash).glob("*"):
                path.unlink() if path.suffix in READ else None
        return inner()

    TritonBundler.collect = staticmethod(collect)


@contextlib.contextmanager
def turn(scratch: Path) -> Iterator[None]:
    """Wait for all others that compile into this folder, of whatever program."""
    scratch.mkdir(parents=True, exist_ok=True)
    with (scratch / "turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_case(case: Case, budget: float, given: argparse.Namespace) -> None:
    """One process: from nothing to files."""
    warnings.simplefilter("ignore")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(given.scratch / case.label)
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    begun = time.time()
    slim()
    with contextlib.ExitStack() as held:

        def enter() -> None:
            print(f"{case.label} {budget}: compiled after {time.time() - begun:.0f} s", flush=True)
            held.enter_context(turn(given.scratch))

        try:
            _, facts = Compiled(case, budget, given.out).ready(enter)
            print(f"{case.label} {budget}: ready after {time.time() - begun:.0f} s, {facts}", flush=True)
        except Exception as error:
            print(f"{case.label} {budget}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def beside(
    jobs: list[tuple[Case, float]], start: Callable[..., multiprocessing.Process], count: int, end: float
) -> None:
    """As many processes as are allowed, until all is done or the time is up."""
    running: list[multiprocessing.Process] = []
    waiting = list(jobs)
    while time.time() < end and (running or waiting):
        running = [process for process in running if process.is_alive()]
        while waiting and len(running) < count:
            running.append(start(*waiting.pop(0)))
        time.sleep(0.2)
    for process in running:
        for pid in (*children(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/inductor-cache"), help="the same every time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default="1x4096,32x224")
    parser.add_argument("--only", default=",".join(FIRST))
    parser.add_argument("--budgets", default="0.5")
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--limit", type=float, default=600)
    given = parser.parse_args()
    if given.device == "cpu":
        cases.on_cpu()
    given.out.mkdir(parents=True, exist_ok=True)
    begun = time.time()
    import torch._dynamo  # noqa: F401  # before processes are forked from here

    torchvision()
    context = multiprocessing.get_context("fork")

    def start(case: Case, budget: float) -> multiprocessing.Process:
        process = context.Process(target=compile_case, args=(case, budget, given))
        process.start()
        return process

    jobs = [(case, float(b)) for b in given.budgets.split(",") for case in cases_of(given.only, given.sizes)]
    left = [(case, b) for case, b in jobs if not Compiled(case, b, given.out).kept[0].exists()]
    beside(left, start, given.processes, begun + given.limit)
    ready = sum(Compiled(case, b, given.out).kept[0].exists() for case, b in jobs)
    print(f"{ready} of {len(jobs)} cases are compiled ({time.time() - begun:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
