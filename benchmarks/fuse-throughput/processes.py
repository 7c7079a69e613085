"""What people do without fusing: plain PyTorch in as many processes on one GPU, without and with NVIDIA MPS.

    python processes.py --out results.json [--count 16] [--only resnet18-b32,transformer-b20]

All processes of both kinds start at the beginning, build every model, and wait; then some or all of them train one
workload for a second, at the same time, while the others stand still.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(Path(__file__).resolve().parent)]

_START_S = 0.3
_MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/fuse-mps", "CUDA_MPS_LOG_DIRECTORY": "/tmp/fuse-mps-log"}


def child(names: list[str], device: str, tiny: bool) -> None:
    """One process: says that it is ready, then trains what it is told, when it is told."""
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

    steps = {name: training(name) for name in names}
    print("ready", flush=True)
    for line in sys.stdin:
        name, start, seconds = line.split()
        begin, count = float(start), 0
        late = max(0.0, time.time() - begin)
        time.sleep(max(0.0, begin - time.time()))
        while time.time() < begin + float(seconds):
            steps[name]()
            count += 1
            if count % 4 == 0:
                wait()
        wait()
        print(count / (time.time() - begin), late, flush=True)


def start(count: int, given: argparse.Namespace, env: dict[str, str]) -> list[subprocess.Popen[str]]:
    """Processes that are getting ready."""
    flags = ["--child", "--only", given.only, "--device", given.device, *(["--tiny"] if given.tiny else [])]
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *flags], env=os.environ | env | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(count)
    ]  # fmt: skip


def serve() -> str:
    """Start the server that lets processes share the GPU; returns why not, if it cannot."""
    for folder in _MPS.values():
        Path(folder).mkdir(exist_ok=True)
    try:
        made = subprocess.run(
            ["nvidia-cuda-mps-control", "-d"], env=os.environ | _MPS, capture_output=True, text=True, timeout=20
        )
    except FileNotFoundError:
        return "there is no nvidia-cuda-mps-control"
    return "" if made.returncode == 0 else (made.stderr or made.stdout or "it did not start").strip()[:200]


def together(children: list[subprocess.Popen[str]], name: str, seconds: float) -> dict[str, Any]:
    """Steps per second of all of them."""
    begin = time.time() + _START_S
    for process in children:
        assert process.stdin is not None
        process.stdin.write(f"{name} {begin} {seconds}\n")
        process.stdin.flush()
    told = [process.stdout.readline().split() for process in children if process.stdout is not None]
    rates, late = zip(*((float(a), float(b)) for a, b in told), strict=True)
    return {"steps_per_s": sum(rates), "slowest_per_s": min(rates), "latest_start_s": max(late)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--only", default="resnet18-b32,transformer-b20,mobilenet-v3-b64")
    given = parser.parse_args()
    names = given.only.split(",")
    if given.child:
        child(names, given.device, given.tiny)
        return
    rows: list[dict[str, Any]] = []
    kinds: dict[str, list[subprocess.Popen[str]]] = {}
    try:
        kinds["processes"] = start(given.count, given, {})
        problem = serve()
        if problem:
            rows.append({"what": "processes with MPS", "error": problem})
        else:
            kinds["processes with MPS"] = start(given.count, given, _MPS)
        for what, children in list(kinds.items()):
            first = [process.stdout.readline().strip() for process in children if process.stdout is not None]
            if any(line != "ready" for line in first):
                dead = next(p for p, line in zip(children, first, strict=True) if line != "ready")
                error = dead.stderr.read().strip().splitlines()[-1:] if dead.stderr is not None else []
                rows.append({"what": what, "error": str(error)[:300]})
                del kinds[what]
                for process in children:
                    process.kill()
        for name in names:
            for what, children in kinds.items():
                for count in sorted({1, min(4, given.count), given.count}):
                    if count == 1 and what != "processes":
                        continue
                    found = together(children[:count], name, given.seconds)
                    rows.append({"workload": name, "precision": "tf32", "what": what, "members": count} | found)
                    print(rows[-1], flush=True)
    finally:
        for process in (p for children in kinds.values() for p in children):
            process.kill()
        if "processes with MPS" in kinds:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", env=os.environ | _MPS, text=True, timeout=20)
        given.out.write_text(json.dumps({"rows": rows}, indent=1))
        print(rows if len(rows) < 3 else f"{len(rows)} rows", flush=True)


if __name__ == "__main__":
    main()
