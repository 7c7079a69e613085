"""What people do without fusing: plain PyTorch in as many processes on one GPU, without and with NVIDIA MPS.

    python processes.py --out results.json [--count 16] [--only resnet18-b32,transformer-b20]

All processes of both kinds start at the beginning, build every model, and wait; then some or all of them train one
workload for a second, at the same time, while the others stand still.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(Path(__file__).resolve().parent)]

MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/fuse-mps", "CUDA_MPS_LOG_DIRECTORY": "/tmp/fuse-mps-log"}
_START_S = 0.2


def child(names: list[str], device: str, tiny: bool, env: dict[str, str], told: Connection) -> None:
    """One process: says that it is ready, then trains what it is told, when it is told."""
    os.environ |= env
    import measures
    import torch
    import torch.nn.functional as F
    from tests.fusion.workloads import TINY, USUAL

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def training(name: str) -> Any:
        workload = (TINY if tiny else USUAL)[name]
        model = workload.build(0).to(device)
        x, y = (t.to(device) for t in workload.batch())
        optimizer = measures.adam(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        for _ in range(4):
            step()
        wait()
        return step

    try:
        steps = {name: training(name) for name in names}
    except Exception as error:
        told.send(f"{type(error).__name__}: {error}"[:300])
        return
    told.send("ready")
    while True:
        name, begin, seconds = told.recv()
        count, late = 0, max(0.0, time.time() - begin)
        time.sleep(max(0.0, begin - time.time()))
        while time.time() < begin + seconds:
            steps[name]()
            count += 1
            if count % 4 == 0:
                wait()
        wait()
        told.send((count / (time.time() - begin), late))


@dataclass
class Crew:
    """Processes of one kind."""

    what: str
    processes: list[Any]
    lines: list[Connection]

    @classmethod
    def start(cls, what: str, count: int, names: list[str], device: str, tiny: bool, env: dict[str, str]) -> Crew:
        """Processes that are getting ready."""
        import measures  # noqa: F401  # before they are forked from here, so that each need not import it

        context = multiprocessing.get_context("fork")
        pairs = [context.Pipe() for _ in range(count)]
        made = [
            context.Process(target=child, args=(names, device, tiny, env, end), daemon=True) for _, end in pairs
        ]  # fmt: skip
        for process in made:
            process.start()
        return cls(what, made, [line for line, _ in pairs])

    def wait(self, until: float) -> str:
        """Until all are ready; those that are not in time are given up. Returns what went wrong."""
        problem, ready = "", []
        for process, line in zip(self.processes, self.lines, strict=True):
            answer = line.recv() if line.poll(max(0.0, until - time.time())) else "not ready in time"
            if answer == "ready":
                ready.append((process, line))
            else:
                problem = answer
                process.kill()
        self.processes, self.lines = [p for p, _ in ready], [line for _, line in ready]
        return problem

    def together(self, name: str, count: int, seconds: float) -> dict[str, Any]:
        """Steps per second of some of them."""
        begin = time.time() + _START_S
        lines = self.lines[:count]
        for line in lines:
            line.send((name, begin, seconds))
        rates, late = zip(*(line.recv() for line in lines), strict=True)
        found = {"steps_per_s": sum(rates), "slowest_per_s": min(rates), "latest_start_s": max(late)}
        return {"workload": name, "precision": "tf32", "what": self.what, "members": len(lines)} | found

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


def crews(count: int, names: list[str], device: str, tiny: bool) -> tuple[list[Crew], str]:
    """Both kinds, getting ready; and why the second is missing, if it is."""
    plain = Crew.start("processes", count, names, device, tiny, {})
    if problem := serve():
        return [plain], problem
    return [plain, Crew.start("processes with MPS", count, names, device, tiny, MPS)], ""


def compare(made: list[Crew], names: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Rows of both kinds, for all and for four processes of each."""
    for name in names:
        for crew in made:
            for count in sorted({min(4, len(crew.lines)), len(crew.lines)} - {0}):
                yield crew.together(name, count, seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--patience", type=float, default=60.0)
    parser.add_argument("--only", default="resnet18-b32,transformer-b20")
    given = parser.parse_args()
    names = given.only.split(",")
    made, problem = crews(given.count, names, given.device, given.tiny)
    rows: list[dict[str, Any]] = [{"what": "processes with MPS", "error": problem}] if problem else []
    try:
        until = time.time() + given.patience
        for crew in made:
            if trouble := crew.wait(until):
                rows.append({"what": crew.what, "error": trouble})
        for row in compare(made, names, given.seconds):
            rows.append(row)
            print(row, flush=True)
    finally:
        for crew in made:
            crew.stop()
        if not problem:
            dismiss()
        given.out.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
