"""What people do without fusing: as many processes on one GPU, without and with NVIDIA MPS.

They train in plain PyTorch, and under MPS also as strong as a process can be (`graphed_process`: cuDNN's search, the
faster layout, the step as a CUDA graph).

    python processes.py --out results.json [--counts 4,16] [--only resnet18-b32/tf32,transformer-b20/amp]

The processes of both kinds start at the beginning. For each workload, those of one kind build their models and wait;
then some or all of them train for a second, at the same time, while the others stand still. Every row is written as
soon as it is there.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(Path(__file__).resolve().parent)]

Row = dict[str, Any]
MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/fuse-mps", "CUDA_MPS_LOG_DIRECTORY": "/tmp/fuse-mps-log"}
_START_S = 0.1


def child(device: str, tiny: bool, env: dict[str, str], graphs: bool, told: Connection) -> None:
    """One process: builds what it is told, and trains it when it is told; answers each time."""
    os.environ |= env
    import measures
    import torch
    from graphed_process import graphed_step

    from tests.fusion.workloads import TINY, USUAL

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    step: Any = None

    def build(name: str) -> None:
        nonlocal step
        step = None
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        workload, precision = name.split("/")
        make = graphed_step if graphs else measures.plain
        step = make(torch.device(device), (TINY if tiny else USUAL)[workload], precision == "amp")
        for _ in range(3):
            step()
        wait()

    def train(begin: float, seconds: float) -> float:
        count = 0
        time.sleep(max(0.0, begin - time.time()))
        while time.time() < begin + seconds:
            step()
            count += 1
            if count % 4 == 0:
                wait()
        wait()
        return count / (time.time() - begin)

    if device == "cuda":
        torch.zeros(1, device=device)
    told.send("ready")
    while True:
        name, *when = told.recv()
        try:
            told.send(train(*when) if when else build(name) or "ready")
        except Exception as error:
            told.send(f"{type(error).__name__}: {error}"[:300])


@dataclass
class Crew:
    """Processes of one kind."""

    what: str
    processes: list[Any]
    lines: list[Connection]

    @classmethod
    def start(cls, what: str, count: int, device: str, tiny: bool, env: dict[str, str], graphs: bool = False) -> Crew:
        """Processes that are getting ready."""
        context = multiprocessing.get_context("fork")
        pairs = [context.Pipe() for _ in range(count)]
        made = [context.Process(target=child, args=(device, tiny, env, graphs, end), daemon=True) for _, end in pairs]
        for process in made:
            process.start()
        return cls(what, made, [line for line, _ in pairs])

    def ready(self, until: float) -> str:
        """Wait until all have answered; those that are not in time are given up. Returns what went wrong."""
        problem, there = "", []
        for process, line in zip(self.processes, self.lines, strict=True):
            answer = line.recv() if line.poll(max(0.0, until - time.time())) else "not ready in time"
            if answer == "ready":
                there.append((process, line))
            else:
                problem = answer
                process.kill()
        self.processes, self.lines = [p for p, _ in there], [line for _, line in there]
        return problem

    def build(self, name: str, until: float) -> str:
        """Let all build a workload; returns what went wrong."""
        for line in self.lines:
            line.send((name,))
        return self.ready(until)

    def together(self, name: str, count: int, seconds: float) -> Row:
        """Steps per second of some of them."""
        begin = time.time() + _START_S
        lines = self.lines[:count]
        for line in lines:
            line.send((name, begin, seconds))
        workload, precision = name.split("/")
        facts = {"workload": workload, "precision": precision, "what": self.what, "members": len(lines)}
        rates = [line.recv() for line in lines]
        if failed := [rate for rate in rates if isinstance(rate, str)]:
            return facts | {"error": failed[0]}
        return facts | {"steps_per_s": sum(rates), "slowest_per_s": min(rates)}

    def stop(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()


def serve() -> str:
    """Start the server that lets processes share the GPU; returns why not, if it cannot."""
    for folder in MPS.values():
        Path(folder).mkdir(exist_ok=True)
    try:
        made = subprocess.run(
            ["nvidia-cuda-mps-control", "-d"], env=os.environ | MPS, capture_output=True, text=True, timeout=20
        )
    except FileNotFoundError:
        return "there is no nvidia-cuda-mps-control"
    return "" if made.returncode == 0 else (made.stderr or made.stdout or "it did not start").strip()[:200]


def dismiss() -> None:
    """End the server."""
    subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", env=os.environ | MPS, text=True, timeout=20)


class Table:
    """Rows, on disk as they come."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows, self.begun = path, list[Row](), time.time()

    def add(self, row: Row) -> None:
        """Print it and write all."""
        self.rows.append(row | {"at_s": round(time.time() - self.begun, 1)})
        self.path.write_text(json.dumps({"rows": self.rows}, indent=1))
        print(self.rows[-1], flush=True)


def compare(crews: list[Crew], names: list[str], counts: list[int], given: argparse.Namespace, table: Table) -> None:
    """Rows of both kinds, workload by workload, until the time is over."""
    for name in names:
        for crew in crews:
            if (now := time.time()) - table.begun > given.limit:
                table.add({"what": crew.what, "workload": name, "skipped": "out of time"})
                continue
            if trouble := crew.build(name, now + given.patience):
                table.add({"what": crew.what, "workload": name, "error": trouble})
            for count in sorted({min(n, len(crew.lines)) for n in counts} - {0}):
                table.add(crew.together(name, count, given.seconds))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--counts", default="2,4,8,16")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--patience", type=float, default=30.0)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which no workload is begun")
    parser.add_argument("--only", default="resnet18-b32/tf32,transformer-b20/tf32")
    given = parser.parse_args()
    from run import preload

    table, counts = Table(given.out), sorted(map(int, given.counts.split(",")))
    preload(given.device)
    crews = [Crew.start("processes", counts[-1], given.device, given.tiny, {})]
    if given.device == "cpu":
        problem = "not on a CPU"
        crews.append(Crew.start("processes, graphs", counts[-1], "cpu", given.tiny, {}, graphs=True))
    elif problem := serve():
        table.add({"what": "processes with MPS", "error": problem})
    else:
        start = (counts[-1], given.device, given.tiny, MPS)
        crews.append(Crew.start("processes with MPS", *start))
        crews.append(Crew.start("processes with MPS, graphs", *start, graphs=True))
    try:
        for crew in crews:
            if trouble := crew.ready(time.time() + given.patience):
                table.add({"what": crew.what, "error": trouble})
        compare(crews, given.only.split(","), counts, given, table)
    finally:
        for crew in crews:
            crew.stop()
        if not problem:
            dismiss()


if __name__ == "__main__":
    main()
