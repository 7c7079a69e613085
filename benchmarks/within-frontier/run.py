"""Step time against peak memory: plain PyTorch, outcore.within at several budgets, and the peers, in one run.

    python costs.py --out costs/                                # on the device
    python plans.py --costs costs/ --out plans.json.gz          # anywhere
    python compile_ahead.py --out compiled/                     # on the device
    python run.py --out results/DATE-h200-frontier.json --costs costs/ --plans plans.json.gz --caches compiled/

    python run.py --out /tmp/dry.json --device cpu --sizes 1x64,2x64 ...        # everything once, small

A step is forward, loss, backward and an SGD step. The peak is the allocator's own; the time is the median of steps
timed with CUDA events. Every row is one way of training the same weights on the same batch.

Processes prepare rows beside each other and measure alone (`benchmarks/gate.py`). Some take cases one by one, some load
what torch.compile has made before (`compile_ahead.py`), some wait for pinned memory (`save_on_cpu`). A row is admitted
by the memory it will take, on the device and on the host.
Every row is written as soon as it is measured, so that a run that is cut short keeps what it has; what did not fit in
the time stands in the file as skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path
from queue import Empty
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking whether there is a GPU must not open it before the fork

import cases  # noqa: E402
import torch  # noqa: E402
from cases import Case, cases_of  # noqa: E402
from gate import Gate  # noqa: E402
from networks import torchvision  # noqa: E402
from plans import read  # noqa: E402
from ways import Prepared, Row, clean  # noqa: E402

import outcore  # noqa: E402

Job = tuple[str, list[str]]
"""A case, and the ways of it that are to be measured."""
SAVED = "save_on_cpu"
"""What takes tens of gigabytes of pinned memory, for all cases in processes of its own."""
TOLD = "ms peak reserved budget compile_s loaded error skipped rounds alone_s asked_s begun_s at_s".split()


class Lanes:
    """What the processes of a run share."""

    def __init__(self, given: argparse.Namespace, jobs: list[list[Job]]) -> None:
        self.given, self.begun = given, time.time()
        context = multiprocessing.get_context("fork")
        self.kinds = [kind for kind, count in enumerate(self.counts) for _ in range(count)]
        """Which queue every process takes from."""
        self.device = Gate(context, len(self.kinds), given.gib)
        self.host = Gate(context, 1, given.host_gib)
        self.pulse_ms, self.rows = context.Value("d", 1e9, lock=False), context.Queue()
        self.jobs = [context.Queue() for _ in jobs]
        for queue, some in zip(self.jobs, jobs, strict=True):
            for job in some:
                queue.put(job)
        self.context = context
        self.workers = [self.worker(index) for index in range(len(self.kinds))]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Processes for cases, for what is compiled, for `save_on_cpu`."""
        return self.given.workers, self.given.compilers, self.given.savers

    def worker(self, index: int) -> Any:
        return self.context.Process(target=self.work, args=(index, self.jobs[self.kinds[index]]))

    def work(self, index: int, jobs: Any) -> None:
        """One process: prepare beside others, measure alone."""
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        self.index = index
        with self.device.inside(index):
            awake()
            self.rows.put({"environment": environment()})
            while True:
                try:
                    label, ways = jobs.get(timeout=0.5)
                except Empty:
                    break
                self.case(label, ways, jobs)

    def case(self, label: str, ways: list[str], jobs: Any) -> None:
        """The rows of one case; where the device does not answer any more, another process goes on with the rest."""
        prepared = prepare(cases_of(label, self.given.sizes)[0], self.given)
        done: set[str] = set()
        for i, way in enumerate(ways):
            if "graphs" in way and way.partition(" /")[0] in done:
                continue  # an earlier plan for this budget kept to it
            row = self.row(prepared, way)
            done |= {way.partition(" /")[0]} if "ms" in row else set()
            self.rows.put({**prepared.case.key, "how": way, **row})
            if "CUDA error" in row.get("error", ""):
                jobs.put((label, ways[i + 1 :]))
                time.sleep(0.5)  # until that is written
                raise SystemExit(1)

    def row(self, prepared: Prepared, way: str) -> Row:
        """Measure one."""
        gib, host_gib, asked = prepared.gib(way), prepared.host_gib(way), time.time()
        if asked - self.begun > self.given.limit:
            return {"skipped": "out of time"}
        if gib > self.given.gib or host_gib > self.given.host_gib:
            return {"skipped": f"takes about {gib:.0f} GiB of the device, {host_gib:.0f} GiB of the host"}
        begun = [asked]
        with contextlib.ExitStack() as held:

            def enter() -> None:
                held.enter_context(self.host.room(host_gib) if host_gib > 0.5 else contextlib.nullcontext())
                held.enter_context(self.device.room(gib))
                begun.append(time.time())

            try:
                alone, aside = (lambda: self.device.alone(self.quiet)), (lambda: self.device.outside(self.index))
                found = prepared.measured(way, alone, aside, enter, self.given.caches)
            except torch.OutOfMemoryError as error:
                found = {"error": f"out of memory: {str(error)[:200]}"}
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            with contextlib.suppress(RuntimeError):
                clean()
        at = {"asked_s": asked, "begun_s": begun[-1], "at_s": time.time()}
        return found | {name: round(when - self.begun, 1) for name, when in at.items()}

    def quiet(self) -> None:
        """Wait until the device does nothing else: a kernel of fixed length takes no longer than it has to."""
        if cases.DEVICE == "cpu":
            return
        good, end = 0, time.time() + 5
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        while good < 3 and time.time() < end:
            start.record()
            torch.cuda._sleep(12_000_000)
            stop.record()
            stop.synchronize()
            took = start.elapsed_time(stop)
            self.pulse_ms.value = min(self.pulse_ms.value, took)
            good = good + 1 if took < 1.1 * self.pulse_ms.value else 0

    def collect(self) -> None:
        """Write rows as they come, until all is done or the time is up."""
        facts: Row = {}
        found: list[Row] = []
        end = self.begun + self.given.limit + self.given.grace
        for worker in self.workers:
            worker.start()
        while time.time() < end and (any(worker.is_alive() for worker in self.workers) or not self.rows.empty()):
            for index, worker in enumerate(self.workers):
                if worker.exitcode == 1:  # its device did not answer any more
                    self.workers[index] = self.worker(index)
                    self.workers[index].start()
            try:
                row = self.rows.get(timeout=1)
            except Empty:
                continue
            if "environment" in row:
                facts = row["environment"]
                continue
            found.append(row)
            self.given.out.write_text(json.dumps({"environment": facts, "rows": found}, indent=1) + "\n")
            told = {k: row[k] for k in TOLD if k in row}
            print(*(row[k] for k in ("model", "batch", "precision", "how")), told, flush=True)
        for worker in self.workers:
            worker.kill()  # whoever is late, or stopped
        print(f"{len(found)} rows in {time.time() - self.begun:.0f} s", flush=True)


def asked(given: argparse.Namespace) -> list[Job]:
    """The cases that are wanted, in that order, each with its ways."""
    jobs: dict[str, list[str]] = {}
    for part in given.only.split(","):
        name, _, starts = part.partition(":")
        for case in cases_of(name, given.sizes):
            ways = [way for way in prepare(case, given).ways if way.startswith(tuple(starts.split("+")))]
            jobs.setdefault(case.label, ways)
    return list(jobs.items())


def prepare(case: Case, given: argparse.Namespace) -> Prepared:
    """A case with its costs and plans."""
    keeping = case.costs(given.costs) if given.costs is not None else None
    plans = {way: plan for path in given.plans for way, plan in read(path).get(case.label, {}).items()}
    if keeping is None:
        return Prepared(case, 1500 * case.batch * case.side**2)
    turned = case.costs(given.costs, turned=True)
    plans = {way: plan for way, plan in plans.items() if "channels_last" not in way or turned is not None}
    return Prepared(case, keeping.plain.peak_bytes, keeping, plans, turned)


def preload() -> None:
    """Import, before processes are forked from here, what each of them would import: seconds of it."""
    import sympy  # noqa: F401
    import torch._dynamo
    import torch.fx.experimental.symbolic_shapes

    torchvision()
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401
    assert not torch.cuda.is_initialized()
    gc.freeze()  # else every process looks through all of this again and again while it measures


def awake() -> None:
    """Load what a first step would load, before memory is asked for."""
    if cases.DEVICE == "cuda":
        for kind in (torch.float32, torch.bfloat16):
            layers = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.BatchNorm2d(8)).to("cuda", kind)
            out = layers(torch.randn(2, 8, 16, 16, device="cuda", dtype=kind))
            (out.flatten(1) @ out.flatten(1).T).sum().backward()
        torch.cuda.synchronize()


def environment() -> Row:
    on_gpu = cases.DEVICE == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "python": sys.version.split()[0],
        "outcore": outcore.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default="1x4096,32x224")
    parser.add_argument(
        "--only",
        default="",
        help="only these cases, as resnet50-1x4096-tf32, or parts of their names, "
        "and of a case only the ways that begin so: 'unet:plain+outcore 0.5'",
    )
    parser.add_argument("--costs", type=Path, help="a folder that costs.py has written")
    parser.add_argument("--plans", type=Path, nargs="+", default=[], help="what plans.py has written; later ones count")
    parser.add_argument(
        "--caches", type=Path, help="a folder that compile_ahead.py has written; without, all is compiled here"
    )
    parser.add_argument("--compile", default="0.5", help="memory budgets for torch.compile")
    parser.add_argument("--compile-only", default="", help="compile only these cases")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--compilers", type=int, default=4)
    parser.add_argument("--savers", type=int, default=3)
    parser.add_argument("--gib", type=float, default=117, help="memory of the device that all rows together may take")
    parser.add_argument("--host-gib", type=float, default=80, help="memory of the host that they may pin")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which no row is begun")
    parser.add_argument("--grace", type=float, default=20, help="seconds that rows begun before may take after")
    given = parser.parse_args()
    if given.device == "cpu":
        cases.on_cpu()
    preload()
    rows = asked(given)
    plain = {label: prepare(cases_of(label, given.sizes)[0], given).plain_bytes for label, _ in rows}
    saved = sorted((label for label, ways in rows if SAVED in ways), key=plain.__getitem__, reverse=True)
    peers = [f"compile budget {budget}" for budget in given.compile.split(",") if budget]
    queues = [
        [(label, rest) for label, ways in rows if (rest := [way for way in ways if way != SAVED])],
        [(case.label, peers) for case in cases_of(given.compile_only, given.sizes) if peers and given.compilers],
        [(label, [SAVED]) for label in saved if given.savers],
    ]
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    Lanes(given, queues).collect()


if __name__ == "__main__":
    main()
